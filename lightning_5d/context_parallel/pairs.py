"""What is computed of pairs of a rank's tokens, kept as what it was made of: masks that a model writes down itself.

A table of pairs of a rank's own tokens says nothing of the others' tokens. One that compares a number per token with itself, such as
``document[:, :, None] == document[:, None, :]``, can be said of all tokens: the numbers are gathered, the table is never made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_5d.context_parallel.inside import Inside
from lightning_5d.context_parallel.masks import AttentionMask
from lightning_5d.context_parallel.place import refused
from lightning_5d.context_parallel.triangle import Triangle, number_of

HIDES = -1e4
"""Added to scores, so much or less leaves nothing of a probability: models take -inf, a dtype's smallest number, -1e9 or -1e4."""

_ASKED = frozenset(
    ["__get__", "__hash__", "__len__", "dim", "ndimension", "size", "stride", "numel", "nelement", "is_floating_point", "get_device",
     "element_size", "is_contiguous", "data_ptr", "storage_offset", "is_complex"]
)  # fmt: skip
_SAME = frozenset(["clone", "contiguous", "detach", "alias"])
_VIEWS = frozenset(["__getitem__", "unsqueeze", "squeeze", "expand"])
_RESHAPES = frozenset(["view", "reshape"])
_DTYPES = frozenset(["to", "type", "bool", "float", "half", "bfloat16", "double", "int", "long", "type_as"])
_OF_NUMBERS = frozenset(
    ["__invert__", "logical_not", "bitwise_not", "neg", "__neg__", "mul", "__mul__", "__rmul__", "multiply", "add", "__add__", "__radd__",
     "sub", "__sub__", "__rsub__", "rsub", "eq", "__eq__", "ne", "__ne__", "gt", "__gt__", "ge", "__ge__", "lt", "__lt__", "le", "__le__",
     "div", "__truediv__"]
)  # fmt: skip
_AND = frozenset(["__and__", "__rand__", "__iand__", "bitwise_and", "logical_and"])
_OR = frozenset(["__or__", "__ror__", "__ior__", "bitwise_or", "logical_or"])
_TIMES = frozenset(["mul", "__mul__", "__rmul__", "multiply", "minimum"])
_PLUS = frozenset(["add", "__add__", "__radd__", "minimum"])

# Strides that no tensor has: by them the dimensions of queries and keys are found again in a view.
_QUERY, _KEY = 7919 << 40, 104729 << 40


Purpose = Literal["shows", "hides", "added"]
"""What a mask is for: one where a key is seen, one where it is not, or added to scores."""


@dataclass(frozen=True, eq=False)
class Condition:
    """One thing that pairs of a query and a key have to fulfil.

    Attributes:
        kind: ``"document"``: their numbers are the same. ``"distance"``: the query's number less the key's is from `low` to `high`.
            ``"key"``: the key's number is true. ``"causal"``: the key is not after the query, by their places in the sequence.
        rows: Which row of `tokens` counts, for each of a table's dimensions before those of queries and keys; int64, on the CPU.
        tokens: (R, s), a number per token of this rank; ``None`` for ``"causal"``.
        low: Of distances; ``None`` for any.
        high: Of distances.
    """

    kind: Literal["document", "distance", "key", "causal"]
    rows: Tensor
    tokens: Tensor | None = None
    low: int | None = None
    high: int | None = None

    def local(self, size: int, device: torch.device) -> Tensor:
        """(..., s, s), bool: the table of this rank's own pairs."""
        if self.tokens is None:
            return torch.ones(*self.rows.shape, size, size, dtype=torch.bool, device=device).tril()
        tokens = self.tokens[self.rows.to(self.tokens.device)]
        if self.kind == "key":
            return tokens.bool().unsqueeze(-2).expand(*tokens.shape, size)
        query, key = tokens.unsqueeze(-1), tokens.unsqueeze(-2)
        if self.kind == "document":
            return query == key
        seen = torch.ones(*tokens.shape, size, dtype=torch.bool, device=tokens.device)
        if self.low is not None:
            seen = seen & (query - key >= self.low)
        return seen if self.high is None else seen & (query - key <= self.high)


class Pairs(Tensor):
    """A table of pairs of tokens, (..., s, s), that holds one number; what it is made of is known.

    Whatever is not followed is computed with the table of this rank's own pairs, and is a plain tensor.

    Attributes:
        inside: The door in which it was made.
        conditions: What it is made of.
    """

    inside: Inside
    conditions: tuple[Condition, ...]

    @classmethod
    def _with(
        cls, inside: Inside, conditions: Sequence[Condition], shape: Sequence[int], dtype: torch.dtype, device: Any
    ) -> Self:
        pairs = torch.zeros((), dtype=dtype, device=device).expand(tuple(shape)).as_subclass(cls)
        lead = tuple(shape[:-2])
        pairs.inside = inside
        pairs.conditions = tuple(replace(each, rows=each.rows.expand(lead)) for each in conditions)
        return pairs

    def plain(self) -> Tensor:
        """The table of this rank's own pairs."""
        raise NotImplementedError

    def like(self, conditions: Sequence[Condition], shape: Sequence[int]) -> Self:
        """The same of another shape."""
        raise NotImplementedError

    def follow(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pairs | None:
        """What an operation makes of it; ``None`` if that is not followed."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Follows what is known, and computes the rest with the plain table."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if any(kind is not Tensor and not issubclass(kind, Pairs | Triangle) for kind in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            if name in _ASKED:
                answer = func(*args, **kwargs)
                if not isinstance(answer, Tensor):
                    return answer
            for mask in [x for x in (*args, *kwargs.values()) if isinstance(x, Pairs)]:
                followed = mask.follow(name, func, args, kwargs)
                if followed is not None:
                    return followed
            _refuse_writing(name, args, kwargs)
            args, kwargs = tree_map_only(Pairs, lambda pairs: pairs.plain(), (args, kwargs))
            return func(*args, **kwargs)

    def _view(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self | None:
        """A view, if it still has queries and keys at its end."""
        lead, size = tuple(self.shape[:-2]), self.shape[-1]
        if name in _RESHAPES:
            shape = tuple(self.as_subclass(Tensor).reshape(*args[1:], **kwargs).shape) if not _has_dtype(args) else ()
            if shape[-2:] != (size, size):
                return None
            rows = [each.rows.reshape(shape[:-2]) for each in self.conditions]
        else:
            if name == "__getitem__" and not _is_plain_index(args[1]):
                return None
            probe = torch.empty_strided((*lead, size, size), (*[0] * len(lead), _QUERY, _KEY), device="meta")
            seen = func(probe, *args[1:], **kwargs)
            if seen.ndim < 2 or seen.stride()[-2:] != (_QUERY, _KEY) or seen.shape[-2:] != (size, size):
                return None
            shape = tuple(seen.shape)
            tables = [each.rows[..., None, None].expand(*lead, size, size) for each in self.conditions]
            rows = [func(table, *args[1:], **kwargs)[..., 0, 0] for table in tables]
        return self.like([replace(c, rows=r) for c, r in zip(self.conditions, rows, strict=True)], shape)


class PairMask(Pairs):
    """A mask: one value where all conditions hold, and another elsewhere.

    Attributes:
        pair: (2,) on the CPU: the two values.
    """

    pair: Tensor
    answers: dict[Any, AttentionMask]
    """What was found out about it."""

    @classmethod
    def of(
        cls, inside: Inside, conditions: Sequence[Condition], values: Tensor, shape: Sequence[int], device: Any
    ) -> PairMask:
        """A mask of some shape (..., s, s)."""
        mask = cls._with(inside, conditions, shape, values.dtype, device)
        mask.pair, mask.answers = values, {}
        return mask

    def like(self, conditions: Sequence[Condition], shape: Sequence[int]) -> PairMask:
        """The same of another shape."""
        return self.of(self.inside, conditions, self.pair, shape, self.device)

    def plain(self) -> Tensor:
        """The table of this rank's own pairs."""
        seen = torch.ones((), dtype=torch.bool, device=self.device)
        for condition in self.conditions:
            seen = seen & condition.local(self.shape[-1], self.device)
        values = self.pair.to(self.device)
        return torch.where(seen, values[0], values[1]).expand(self.shape).contiguous()

    def turned(self) -> PairMask:
        """The same with the opposite condition, where that is one: a distance with one bound."""
        one = self.conditions[0]
        if len(self.conditions) > 1 or one.kind != "distance" or (one.low is None) == (one.high is None):
            return self
        low, high = None if one.high is None else one.high + 1, None if one.low is None else one.low - 1
        other = replace(one, low=low, high=high)
        return self.of(self.inside, [other], self.pair.flip(0), self.shape, self.device)

    def shows(self) -> bool:
        """Whether it is one where a key is seen, and zero elsewhere."""
        return self.pair.tolist() in ([1, 0], [True, False])

    def hides(self) -> bool:
        """Whether it is one where no key is seen, and zero elsewhere."""
        return self.pair.tolist() in ([0, 1], [False, True])

    def is_added(self) -> bool:
        """Whether it can be added to scores."""
        seen, hidden = self.pair.tolist()
        return self.dtype.is_floating_point and bool(seen == 0 and hidden <= HIDES)

    def fits(self, purpose: Purpose) -> bool:
        """Whether it is such a mask."""
        return {"shows": self.shows, "hides": self.hides, "added": self.is_added}[purpose]()

    def follow(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pairs | None:
        """What an operation makes of it."""
        is_first = bool(args) and args[0] is self
        if name == "masked_fill" and len(args) == 3:
            return self._filled(args[0], args[1], args[2])
        if name == "where":
            return self._chosen(args) if is_first and len(args) == 3 else None
        if is_first and name in _SAME:
            return self
        if is_first and (name in _VIEWS or name in _RESHAPES) and not (_has_dtype(args) or "dtype" in kwargs):
            return self._view(name, func, args, kwargs)
        if is_first and (name in _DTYPES or name in ("view", "cpu", "cuda")):
            one = func(torch.zeros((), dtype=self.dtype, device=self.device), *args[1:], **kwargs)
            return self.of(self.inside, self.conditions, self.pair.to(one.dtype), self.shape, one.device)
        others = [x for x in args if x is not self]
        if name in _OF_NUMBERS and not kwargs and all(_is_number(x) for x in others):
            given = [self.pair if x is self else x.cpu() if isinstance(x, Tensor) else x for x in args]
            return self.of(self.inside, self.conditions, func(*given), self.shape, self.device)
        if len(args) == 2 and len(others) == 1 and isinstance(others[0], Tensor) and not kwargs:
            return self._both(name, others[0])
        return None

    def _chosen(self, args: tuple[Any, ...]) -> PairMask | None:
        if self.dtype != torch.bool:
            return None
        shape, numbers = tuple(self.shape), []
        for x in args[1:]:
            if isinstance(x, Tensor):
                shape = _broadcast(shape, x.shape)
                number = None if isinstance(x, Pairs) else number_of(x)
                if number is None:
                    return None
                numbers.append(torch.tensor(number, dtype=x.dtype))
            else:
                numbers.append(x)
        if shape[-2:] != self.shape[-2:]:
            return None
        seen, hidden = numbers
        return self.of(self.inside, self.conditions, torch.where(self.pair, seen, hidden), shape, self.device)

    def _filled(self, x: Tensor, where: Any, value: Any) -> PairMask | None:
        is_here = where is self
        if not is_here or isinstance(x, Pairs | Triangle) or not _is_number(value):
            return None
        shape = _broadcast(self.shape, x.shape)
        number = number_of(x)
        if number is None or shape[-2:] != self.shape[-2:] or self.dtype != torch.bool:
            return None
        values = torch.full((2,), number, dtype=x.dtype).masked_fill(self.pair, value)
        return self.of(self.inside, self.conditions, values, shape, self.device)

    def _both(self, name: str, other: Tensor) -> PairMask | None:
        """Both masks at once."""
        for mask in (self, self.turned()):
            if name in _AND | _TIMES and mask.shows():
                return mask._joined(name, other, "shows")
            if name in _OR and mask.hides():
                return mask._joined(name, other, "hides")
            if name in _PLUS and mask.is_added():
                return mask._joined(name, other, "added")
        return None

    def _joined(self, name: str, other: Tensor, how: Purpose) -> PairMask | None:
        shape = _broadcast(self.shape, other.shape)
        found = _conditions(self.inside, other, how, self.shape[-1])
        if found is None or tuple(shape[-2:]) != tuple(self.shape[-2:]):
            return None
        logical = name.startswith("logical")
        dtype = torch.bool if logical else torch.promote_types(self.dtype, other.dtype)
        if name in ("__and__", "__or__", "bitwise_and", "bitwise_or") and self.dtype != other.dtype:
            return None
        lead = shape[:-2]
        conditions = [replace(c, rows=c.rows.expand(lead)) for c in (*self.conditions, *found)]
        return self.of(self.inside, conditions, self.pair.to(dtype), shape, self.device)


class Distances(Pairs):
    """The number of a pair's query less that of its key, or the reverse, or how far apart they are.

    Attributes:
        direction: 1, or -1 for the reverse; 0 for how far apart.
    """

    direction: int

    @classmethod
    def of(cls, inside: Inside, condition: Condition, sign: int, shape: Sequence[int]) -> Distances:
        """Distances of some shape (..., s, s)."""
        tokens = condition.tokens
        if tokens is None:
            raise ValueError("Distances need numbers.")
        found = cls._with(inside, [condition], shape, tokens.dtype, tokens.device)
        found.direction = sign
        return found

    def like(self, conditions: Sequence[Condition], shape: Sequence[int]) -> Distances:
        """The same of another shape."""
        return self.of(self.inside, conditions[0], self.direction, shape)

    def plain(self) -> Tensor:
        """The table of this rank's own pairs."""
        condition = self.conditions[0]
        if condition.tokens is None:
            raise ValueError("Distances need numbers.")
        tokens = condition.tokens[condition.rows.to(condition.tokens.device)]
        table = tokens.unsqueeze(-1) - tokens.unsqueeze(-2)
        return table.abs() if self.direction == 0 else table * self.direction

    def follow(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pairs | None:
        """What an operation makes of it."""
        is_first = bool(args) and args[0] is self
        if not is_first or kwargs:
            return None
        if name in _SAME:
            return self
        if name in _VIEWS:
            return self._view(name, func, args, kwargs)
        if name in ("abs", "__abs__", "absolute"):
            return self.of(self.inside, self.conditions[0], 0, self.shape)
        if name in ("neg", "__neg__", "negative"):
            return self.of(self.inside, self.conditions[0], -self.direction, self.shape) if self.direction else None
        kind = name.strip("_")
        if kind in _COMPARISONS and len(args) == 2 and isinstance(args[1], int) and not isinstance(args[1], bool):
            return self._compared(kind, args[1])
        return None

    def _compared(self, kind: str, number: int) -> PairMask:
        low, high = bounds(kind, number, self.direction)
        is_outside = self.direction == 0 and kind in ("ge", "gt")
        condition = replace(self.conditions[0], kind="distance", low=low, high=high)
        values = torch.tensor([not is_outside, is_outside])
        return PairMask.of(self.inside, [condition], values, self.shape, self.device)


def bounds(kind: str, number: int, sign: int) -> tuple[int | None, int | None]:
    """The smallest and the largest distance d for which sign times d compares so with a number.

    Args:
        kind: ``"ge"``, ``"gt"``, ``"le"`` or ``"lt"``.
        number: What is compared with.
        sign: 1 or -1. With 0 it is the size of d that is compared, and for the first two kinds the bounds are of all other distances.
    """
    if sign == 0:
        far = number if kind in ("le", "gt") else number - 1
        return -far, far
    low = {"ge": number, "gt": number + 1}.get(kind)
    high = {"le": number, "lt": number - 1}.get(kind)
    return (low, high) if sign > 0 else (None if high is None else -high, None if low is None else -low)


_COMPARISONS = frozenset(["ge", "gt", "le", "lt"])


def as_mask(inside: Inside, triangle: Triangle) -> PairMask | None:
    """A causal triangle as a mask that can be joined with others."""
    if triangle._version != triangle.made_at or triangle.shape[-1] != triangle.shape[-2]:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        values = torch.tensor([triangle.lower, triangle.upper]).to(triangle.dtype)
        condition = Condition("causal", torch.zeros(triangle.shape[:-2], dtype=torch.int64))
        return PairMask.of(inside, [condition], values, triangle.shape, triangle.device)


def _conditions(inside: Inside, other: Tensor, how: Purpose, size: int) -> Sequence[Condition] | None:
    """What another mask says that is joined with one of pairs; ``None`` if nobody can tell."""
    if isinstance(other, Triangle):
        found = as_mask(inside, other)
        if found is None:
            return None
        other = found
    if isinstance(other, PairMask):
        return next((mask.conditions for mask in (other, other.turned()) if mask.fits(how)), None)
    if isinstance(other, Pairs) or other.requires_grad or not other.ndim or other.shape[-1] != size:
        return None
    if other.ndim == 1 or other.shape[-2] == 1 or other.stride(-2) == 0:
        row = other if other.ndim == 1 else other[..., 0, :]
        seen = _seen(row, how)
        rows = torch.arange(math.prod(row.shape[:-1])).reshape(row.shape[:-1])
        return None if seen is None else [Condition("key", rows, seen.reshape(-1, size))]
    if other.shape[-2:] == (size, size) and (other.dtype == torch.bool) == (how != "added"):
        from lightning_5d.context_parallel.given_masks import is_causal

        if all(length == 1 for length in other.shape[:-2]) and is_causal(inside, other, how == "hides"):
            return [Condition("causal", torch.zeros(other.shape[:-2], dtype=torch.int64))]
    return None


def _seen(row: Tensor, how: Purpose) -> Tensor | None:
    if how == "added":
        seen = row == 0
        return seen if bool((seen | (row <= HIDES)).all()) else None
    if row.dtype != torch.bool and not bool(((row == 0) | (row == 1)).all()):
        return None
    return row.bool() if how == "shows" else ~row.bool()


def _broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    found: torch.Size = torch.broadcast_shapes(*map(tuple, shapes))  # type: ignore[no-untyped-call]
    return tuple(found)


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) or (isinstance(x, Tensor) and not isinstance(x, Pairs) and x.ndim == 0)


def _is_plain_index(index: Any) -> bool:
    each = index if isinstance(index, tuple) else (index,)
    return all(x is None or x is Ellipsis or isinstance(x, slice) or type(x) is int for x in each)


def _has_dtype(args: tuple[Any, ...]) -> bool:
    return any(isinstance(x, torch.dtype) for x in args)


def _refuse_writing(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    target = kwargs.get("out", args[0] if args else None)
    is_inner = name.startswith("__") and name.endswith("__")
    writes = "out" in kwargs or name == "__setitem__" or (name.endswith("_") and not is_inner)
    writes = writes or (is_inner and name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    if writes and isinstance(target, Pairs):
        raise refused(
            target.inside,
            f"writes ({name}) to a mask of pairs of tokens, of which it has those of its own tokens alone",
            "Join masks with & instead, or with torch.where, in a new tensor.",
        )

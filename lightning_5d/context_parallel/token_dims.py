"""Along which dimensions of a tensor a rank's tokens lie, followed from operation to operation.

Sizes do not tell: a model may have as many heads or features as a rank has tokens. Views are followed by their strides, and all
other operations by where they put dimensions. What cannot be followed is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_5d.shown.tensor import ShownTensor
from lightning_5d.tensor_parallel.sequence_mixing import DIMENSION

Dims = frozenset[int]
_NONE: Dims = frozenset()
PRODUCTS = frozenset(["matmul", "__matmul__", "bmm", "mm"])
_LEFT = frozenset(["one_hot", "view_as_complex", "view_as_real"])
_RESHAPES = frozenset(["reshape", "flatten", "view", "unflatten", "contiguous"])
# Where operations that make something of several numbers take the dimension along which these lie.
DIMENSIONS = {
    **DIMENSION,
    **dict.fromkeys(
        ["any", "all", "count_nonzero", "std_mean", "var_mean", "nanmean", "nansum", "cumulative_trapezoid"], 1
    ),
    **dict.fromkeys(["linalg_vector_norm", "linalg_norm", "kthvalue", "quantile", "normalize"], 2),
}


@dataclass(frozen=True)
class Followed:
    """Dimensions of one tensor.

    Attributes:
        tokens: Along these lie the rank's tokens.
        rows: Along these lie its tokens of all sequences, one sequence after the other.
        own: Along these lie numbers that were made by counting the rank's tokens, as if they were all.
        merged: Along these lie its tokens with their features, one after the other.
    """

    tokens: Dims = _NONE
    rows: Dims = _NONE
    own: Dims = _NONE
    merged: Dims = _NONE

    def __or__(self, other: Followed) -> Followed:
        return Followed(
            self.tokens | other.tokens, self.rows | other.rows, self.own | other.own, self.merged | other.merged
        )

    def __bool__(self) -> bool:
        return bool(self.tokens or self.rows or self.own or self.merged)


NOTHING = Followed()


@dataclass
class TokenDims:
    """What is known about the tensors of one call of a door.

    Args:
        length: Tokens that the rank has of each sequence, more than 1.
        whole: Tokens of each sequence.
        buffers: Ids of the modules' buffers.
    """

    length: int
    whole: int
    buffers: frozenset[int] = frozenset()
    _known: dict[int, tuple[Tensor, Followed]] = field(default_factory=dict)
    _made: set[int] = field(default_factory=set)

    def made(self) -> Iterator[Tensor]:
        """What has been made of the rank's tokens inside of the door."""
        for key in self._made:
            tensor, found = self._known[key]
            if found.tokens or found.rows or found.merged:
                yield tensor

    def of(self, x: Any) -> Followed:
        """What is known about a tensor; one from outside has its tokens behind its rows."""
        if not isinstance(x, Tensor):
            return NOTHING
        known = self._known.get(id(x))
        if known is not None:
            return known[1]
        found = NOTHING if isinstance(x, nn.Parameter) or id(x) in self.buffers else self._guess(x.shape)
        self._know(x, found)
        return found

    def follow(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        """Notes what comes of an operation.

        Args:
            name: What it is called.
            args: Its arguments.
            kwargs: Its arguments by name.
            output: What it has returned.
        """
        results = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        if not results:
            return
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for result in results:
            if any(result is x for x in inputs):
                continue
            self._made.add(id(result))
            if not inputs:
                self._know(result, Followed(own=frozenset([0]) if self._counts(result) else _NONE))
                continue
            found = NOTHING
            for place, x in enumerate(inputs):
                source = self.of(x)
                if source:
                    found |= self._through(name, place, x, source, args, kwargs, result)
                if name in ("__getitem__", "narrow", "slice") and place == 0:
                    found |= self._table(x, result)
            if name == "cumsum" and not self.of(inputs[0]):  # of ones, for example
                along = dims_of(name, args, kwargs, result.ndim)
                found |= Followed(own=frozenset(dim for dim in along if result.shape[dim] == self.length))
            self._know(result, found)

    def _know(self, x: Tensor, found: Followed) -> None:
        self._known[id(x)] = (x, found)  # held, or another tensor may get the same id

    def _guess(self, shape: Sequence[int]) -> Followed:
        fitting = [dim for dim, size in enumerate(shape) if size == self.length]
        if 1 in fitting and (len(shape) <= 3 or len(fitting) == 1):
            return Followed(frozenset([1]))
        return Followed(frozenset(fitting)) if len(fitting) == 1 and len(shape) > 1 else NOTHING

    def _counts(self, made: Tensor) -> bool:
        """Whether a tensor that was made of nothing has a growing number for each of the rank's tokens."""
        if made.ndim != 1 or made.shape[0] != self.length or made.dtype == torch.bool or made.is_complex():
            return False
        steps = made.detach().diff()
        return bool(steps[0] != 0) and torch.allclose(steps.double(), steps[0].double(), rtol=1e-3)

    def _table(self, x: Tensor, result: Tensor) -> Followed:
        """The beginning of a table with an entry for each position."""
        is_kept = isinstance(x, nn.Parameter) or id(x) in self.buffers
        if not is_kept or result.ndim != x.ndim or result.data_ptr() != x.data_ptr():
            return NOTHING
        dims = [
            dim
            for dim, (before, now) in enumerate(zip(x.shape, result.shape, strict=True))
            if now == self.length and before >= self.whole and before != now
        ]
        if len(dims) != 1 or torch.equal(result.detach(), result.detach().narrow(dims[0], 0, 1).expand_as(result)):
            return NOTHING
        return Followed(own=frozenset(dims))

    def _through(
        self,
        name: str,
        place: int,
        x: Tensor,
        source: Followed,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Tensor,
    ) -> Followed:
        if _is_view(x, result):
            return self._viewed(x, source, result)

        def moved(dims: Dims) -> Dims:
            to = (self._target(name, place, x, dim, args, kwargs, result) for dim in dims)
            return frozenset(dim for dim in to if dim is not None and 0 <= dim < result.ndim)

        def sized(dims: Dims, multiple: bool = False) -> Dims:
            sizes = ((dim, result.shape[dim]) for dim in dims)
            return frozenset(
                dim for dim, size in sizes if size == self.length or (multiple and size and size % self.length == 0)
            )

        tokens = sized(moved(source.tokens))
        rows = sized(moved(source.rows), multiple=True)
        if name in _RESHAPES and source.rows:  # rows that are taken apart again
            tokens |= frozenset(
                dim for dim in range(1, result.ndim) if result.shape[dim] == self.length and prod(result.shape[: dim + 1]) == prod(x.shape[: min(source.rows) + 1])
            )  # fmt: skip
        if name in _RESHAPES and source.tokens and not tokens:
            rows |= frozenset(
                dim for dim in range(result.ndim) for of in source.tokens if prod(result.shape[: dim + 1]) == prod(x.shape[: of + 1])
            )  # fmt: skip
        merged = moved(source.merged) if result.shape == x.shape else _NONE
        return Followed(tokens, rows - tokens, sized(moved(source.own)), merged)

    def _viewed(self, x: Tensor, source: Followed, result: Tensor) -> Followed:
        def same(dims: Dims) -> Dims:
            strides = {x.stride(dim) for dim in dims}
            return frozenset(
                dim for dim in range(result.ndim) if result.shape[dim] == self.length and result.stride(dim) in strides
            )

        tokens = same(source.tokens | source.rows)
        strides = {x.stride(dim) for dim in source.tokens | source.rows}
        rows = frozenset(
            dim
            for dim in range(result.ndim)
            if dim not in tokens
            and result.stride(dim) in strides
            and result.shape[dim]
            and result.shape[dim] % self.length == 0
        )
        merged = frozenset(
            dim
            for dim in range(result.ndim)
            if dim not in tokens | rows
            and result.stride(dim)
            and any(
                step % result.stride(dim) == 0 and result.stride(dim) * result.shape[dim] >= step * self.length
                for step in {x.stride(dim) for dim in source.tokens}
                if step > result.stride(dim)
            )
        )
        if source.merged and result.shape == x.shape:
            merged |= source.merged
        return Followed(tokens, rows if not tokens else _NONE, same(source.own), merged)

    def _target(
        self, name: str, place: int, x: Tensor, dim: int, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor
    ) -> int | None:
        """Where a dimension of an operation's input is in its output."""
        if name in _RESHAPES:
            before = prod(x.shape[:dim])
            return next((to for to in range(result.ndim) if prod(result.shape[:to]) == before and result.shape[to] == x.shape[dim]), None)  # fmt: skip
        if name in PRODUCTS:
            if (place == 0 and dim == x.ndim - 1) or (place == 1 and dim == max(x.ndim - 2, 0)):
                return None
            return dim - x.ndim + result.ndim
        if name == "linear":
            return dim if place == 0 and dim < x.ndim - 1 else None
        if name == "embedding":
            return dim if place == 0 else None
        if name in _LEFT:
            return dim
        if name == "einsum":
            return einsum_target(args, place, dim)
        if name == "__getitem__":
            return None  # an index that is no view picks
        if name == "stack":
            at = int(kwargs.get("dim", args[1] if len(args) > 1 else 0)) % result.ndim
            return dim + (at <= dim)
        if name in DIMENSIONS and result.ndim < x.ndim:
            gone = set(dims_of(name, args, kwargs, x.ndim))
            return None if dim in gone else dim - sum(other < dim for other in gone)
        # As operations on elements line up; what is gone from others, nobody knows.
        return dim - x.ndim + result.ndim if result.ndim >= x.ndim else None


def dims_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], ndim: int) -> Iterator[int]:
    """The dimensions over which an operation of `DIMENSIONS` works, where it is told."""
    place = DIMENSIONS[name]
    given = kwargs.get("dim", kwargs.get("dims", kwargs.get("axis", args[place] if len(args) > place else None)))
    for dim in given if isinstance(given, tuple | list) else (given,):
        if isinstance(dim, int) and not isinstance(dim, bool) and ndim:
            yield dim % ndim


def einsum_terms(args: Sequence[Any]) -> tuple[list[str], str] | None:
    """Letters of the inputs and of the output of `torch.einsum`."""
    if not args or not isinstance(args[0], str) or "." in args[0]:
        return None
    left, arrow, right = args[0].replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        letters = sorted(set(left) - {","})
        right = "".join(letter for letter in letters if left.count(letter) == 1)
    return terms, right


def einsum_target(args: Sequence[Any], place: int, dim: int) -> int | None:
    """Where a dimension of an input is in the output of `torch.einsum`."""
    terms = einsum_terms(args)
    if terms is None or place >= len(terms[0]) or dim >= len(terms[0][place]):
        return None
    to = terms[1].find(terms[0][place][dim])
    return to if to >= 0 else None


def _is_view(x: Tensor, result: Tensor) -> bool:
    return (
        x.numel() > 0
        and result.numel() > 0
        and type(x).__name__ != "StatedMask"
        and not isinstance(x, ShownTensor)  # those have no memory of their own
        and not isinstance(result, ShownTensor)
        and x.dtype == result.dtype
        and _memory(x) == _memory(result)
    )


def _memory(x: Tensor) -> int:
    while isinstance(x, ShownTensor):  # logits of the tensor axis have no memory themselves
        x = x.local
    return x.untyped_storage().data_ptr()

"""What enters a door: which arguments are cut, along which dimension, and which stay whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from lightning_5d.context_parallel.lengths import (
    SEQUENCE_NAMES,
    BatchLengths,
    Keys,
    Path,
    is_label,
    is_mask,
    named_tensors,
)
from lightning_5d.context_parallel.shown import SequenceShard, is_shown
from lightning_5d.context_parallel.shown.totals import total
from lightning_5d.context_parallel.step_sequence import StepSequence
from lightning_5d.pipeline_parallel.containers import children, rebuilt
from lightning_5d.tensor_parallel.axis import TensorAxis

_CACHES = ("past_key_values", "past_key_value", "cache", "layer_past")
_POSITIONS = ("position_ids", "positions", "position", "cache_position", "pos")


@dataclass(frozen=True)
class Signature:
    """What the forward of a module takes.

    Attributes:
        names: Its parameters by position.
        all_names: Those that can only be given by name, too.
    """

    names: tuple[str, ...]
    all_names: frozenset[str]

    @classmethod
    def of(cls, module: nn.Module) -> Signature:
        """The signature of a module's forward; an empty one where it has none that can be read."""
        try:
            parameters = inspect.signature(module.forward).parameters.values()
        except (TypeError, ValueError):
            return cls((), frozenset())
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return cls(
            tuple(p.name for p in parameters if p.kind in by_position),
            frozenset(p.name for p in parameters if p.kind not in variadic),
        )

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name; those beyond the parameters by their number."""
        names = (*self.names[: len(args)], *map(str, range(len(self.names), len(args))))
        return {**dict(zip(names, args, strict=True)), **kwargs}

    def replaced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], new: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call with other values for some arguments, given before or not."""
        given = list(args)
        kwargs = dict(kwargs)
        for name, value in new.items():
            index = self.names.index(name) if name in self.names else int(name) if name.isdigit() else len(given)
            if index < len(given):
                given[index] = value
            else:
                kwargs[name] = value
        return tuple(given), kwargs


def mapped(value: Any, function: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """A value with everything in it that is no container replaced; itself if nothing is."""
    inside = children(value)
    if inside is None:
        return function(path, value)
    parts = {key: mapped(child, function, (*path, str(key))) for key, child in inside}
    return rebuilt(value, parts) if any(parts[key] is not child for key, child in inside) else value


def is_cache(value: Any) -> bool:
    """Whether it holds keys and values of tokens before, in the manner of Hugging Face."""
    return hasattr(value, "update") and hasattr(value, "get_seq_length")


def continues(named: Mapping[str, Any]) -> bool:
    """Whether a call goes on with a sequence whose beginning is in a cache, as when text is generated."""
    return any(named.get(name) is not None for name in _CACHES) or any(is_cache(value) for value in named.values())


@dataclass(frozen=True)
class Entering:
    """How a call of a door is cut.

    Attributes:
        length: Tokens of its sequences, S.
        rows: B.
        dim: The sequence dimension of the tensor that told.
    """

    length: int
    rows: int
    dim: int


def plain_entering(
    door: str, named: Mapping[str, Any], lengths: BatchLengths, keys: Keys, least: Callable[[int], bool]
) -> Entering | None:
    """How a call is cut that gets plain tensors only; ``None`` if none of them has a sequence.

    A tensor whose dimension `keys` names has one, whatever its length. Others have one if its length is one of the step's, up to a
    token more or less: first those named as in `SEQUENCE_NAMES`, then integers (B, S, …), then (B, S, F).

    Args:
        door: The module's name.
        named: The arguments by name.
        lengths: Those of the step.
        keys: What the person says about dimensions.
        least: Whether so many tokens are enough for the ranks.
    """
    found = [(path, tensor) for path, tensor in named_tensors(named) if tensor.ndim]
    for path, tensor in found:
        if (door, *path) in keys and (dim := keys.dimension((door, *path), tensor)) is not None:
            return Entering(tensor.shape[dim], _rows(tensor, dim), dim)
    free = [
        (path[-1], tensor)
        for path, tensor in found
        if (door, *path) not in keys
        and tensor.ndim >= 2
        and not is_label(path[-1])
        and lengths.near(tensor.shape[1])
        and least(tensor.shape[1])
    ]
    kinds: tuple[Callable[[str, Tensor], bool], ...] = (
        lambda name, t: name in SEQUENCE_NAMES,
        lambda name, t: not t.is_floating_point() and not t.is_complex() and not is_mask(name),
        lambda name, t: t.ndim == 3 and not is_mask(name),
        lambda name, t: lengths.holds(t) and not is_mask(name),
    )
    for fits in kinds:
        for name, tensor in free:
            if fits(name, tensor):
                return Entering(tensor.shape[1], tensor.shape[0], 1)
    return None


def shown_entering(door: str, named: Mapping[str, Any]) -> Entering | None:
    """How a call is cut that gets shown tensors; ``None`` if it gets none.

    Raises:
        MisconfigurationException: If they are of two lengths.
    """
    found = [(path, value, _shown_tokens(value)) for path, value in named_tensors(named) if is_shown(value)]
    if not found:
        return None
    path, _, first = found[0]
    for other, _, how in found[1:]:
        if how.length != first.length:
            raise MisconfigurationException(
                f"{door} got sequences of two lengths: {'.'.join(path)} with {first.length} tokens and {'.'.join(other)} with {how.length}. Each rank"
                " holds a part of one. Pad them to one length in collate_fn."
            )
    return first


def _shown_tokens(shard: SequenceShard) -> Entering:
    placement = shard.placement
    length = placement.size if placement.trail > 1 else placement.tokens.size
    if placement.trail == 1 and placement.merged:
        return Entering(length, placement.lead, 1)
    dim = shard.cut_dim
    return Entering(length, _rows(shard, dim), dim)


def enter_shown(shard: SequenceShard, sequence: StepSequence) -> Tensor:
    """A shown tensor's part for this rank; its tokens stay merged with rows where they are."""
    dim, placement = shard.cut_dim, shard.placement
    if not placement.merged or placement.trail > 1:
        return SequenceShard.enter(shard, dim, sequence)
    apart = shard.unflatten(dim, (placement.lead, placement.tokens.size))  # type: ignore[no-untyped-call]
    return SequenceShard.enter(apart, dim + 1, sequence).flatten(dim, dim + 1)


def _rows(tensor: Tensor, dim: int) -> int:
    return tensor.shape[1 - dim] if dim < 2 <= tensor.ndim else tensor.shape[0] if dim else 1


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are others than before."""
    return {name: value for name, value in after.items() if value is not before[name]}


def cut_dimension(
    door: str, path: Path, tensor: Tensor, entering: Entering, lengths: BatchLengths, keys: Keys
) -> int | None:
    """The sequence dimension of a plain tensor that enters a door; ``None`` if it has none, or stays whole.

    | shape, n being the sequence's length | is cut along |
    |---|---|
    | named in `keys` | what they say |
    | any, named as labels are | nothing: losses compare it with what comes out |
    | (B, n, …) of 3 dimensions and more | 1 |
    | (B, n) of integers or booleans | 1 |
    | (B, n) of floats | 1 if it is of the batch, or named as a mask; features could be as many |
    | (1, n), (n, F), and (n,) of integers, of which n is not B | where n is, as tables of positions are |
    | (B, 1, 1, n), a mask | 3 |
    | (B, H, n, D), D not n | 2 |

    Raises:
        MisconfigurationException: For a mask of pairs of tokens.
    """
    if (door, *path) in keys:
        dim = keys.dimension((door, *path), tensor)
        if dim is not None and tensor.shape[dim] != entering.length:
            raise MisconfigurationException(
                f"{'.'.join(path)} of {door} has {tensor.shape[dim]} entries along dimension {dim}, which ContextParallel(keys=…) names, and the sequence"
                f" has {entering.length} tokens. Give it as many, or None if it has no sequence."
            )
        return dim
    name, shape, n = path[-1], tensor.shape, entering.length
    if is_label(name):
        return None
    mask = is_mask(name) or tensor.dtype == torch.bool
    if mask and tensor.ndim >= 2:
        if shape[-1] == shape[-2] == n and (tensor.ndim > 2 or n != entering.rows or not _of_tokens(name)):
            raise MisconfigurationException(
                f"{'.'.join(path)} of {door} has shape {tuple(shape)}: which token sees which. Of {n} tokens each rank holds a part, so no rank can"
                " use it. What works: causal attention (is_causal=True), and a mask of tokens (batch, tokens), which is padding."
            )
        if tensor.ndim == 4 and shape[1] == shape[2] == 1:
            return 3 if shape[3] == n else None
    if tensor.ndim == 1:
        of_tokens = not tensor.is_floating_point() and n != entering.rows
        return 0 if shape[0] == n and (of_tokens or name in _POSITIONS) else None
    if tensor.ndim == 2 and (tensor.is_floating_point() or tensor.is_complex()):
        if shape[1] == n and (lengths.holds(tensor) or is_mask(name) or shape[0] == 1 != entering.rows):
            return 1
        return 0 if shape[0] == n != entering.rows else None
    if shape[1] == n:
        return 1
    if tensor.ndim == 4 and shape[2] == n:
        return 2
    return 0 if tensor.ndim == 2 and shape[0] == n != entering.rows else None


def _of_tokens(name: str) -> bool:
    return name == "attention_mask" or "padding" in name


def shared(whole: Tensor, axis: TensorAxis) -> Tensor:
    """A plain tensor that enters a door whole: each rank uses it for its tokens, so its gradient is summed over the ranks."""
    if not (torch.is_grad_enabled() and whole.requires_grad):
        return whole
    return cast(Tensor, _Shared.apply(whole, axis))  # type: ignore[no-untyped-call]


class _Shared(torch.autograd.Function):
    """The same tensor; backward: the sum of the ranks' gradients over their number, as gradients inside doors are times that."""

    @staticmethod
    @override
    def forward(ctx: Any, whole: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return whole.view_as(whole)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Out.apply(total(grad, ctx.axis), ctx.axis.size), None  # type: ignore[no-untyped-call]


class _Out(torch.autograd.Function):
    """A gradient from inside of a door at the user's level; what comes back into it from there is multiplied by the ranks, as all is."""

    @staticmethod
    @override
    def forward(ctx: Any, inside: Tensor, ranks: int) -> Tensor:
        return inside / ranks

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None

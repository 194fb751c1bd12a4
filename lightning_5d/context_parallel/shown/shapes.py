"""Views that move tokens among the dimensions, and windows of them: each rank does them on its tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_5d.context_parallel.shown.registry import by_name, handles
from lightning_5d.context_parallel.shown.shard import SequenceShard
from lightning_5d.context_parallel.shown.tokens import Window
from lightning_5d.shown import along, shapes
from lightning_5d.shown.tensor import first_shown

aten = torch.ops.aten


@handles(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_copy.default)
def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard: SequenceShard = args[0]
    shape = list(args[1])
    if -1 in shape:
        others = -math.prod(shape)
        if others <= 0 or shard.numel() % others:
            return NotImplemented
        shape[shape.index(-1)] = shard.numel() // others
    if math.prod(shape) != shard.numel():
        raise RuntimeError(f"shape '{shape}' is invalid for input of size {shard.numel()}")  # as torch says it
    placement = shard.placement.after_view(shard.shape, shape)
    if placement is None:
        return NotImplemented
    shape[placement.dim] = placement.held
    # The shard shows strides without holes, those of `local` may have some.
    return SequenceShard(shard.local.reshape(shape), placement)


@handles(aten._reshape_alias.default)
def _reshape_alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _view(func, args[:2], {})


def _bounds(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    first, last, _ = slice(start, end).indices(size)
    return first, max(first, last)


def _piece(shard: SequenceShard, start: int, stop: int) -> SequenceShard:
    """The window from `start` to `stop` of a tensor with nothing but a window of tokens in its dimension."""
    tokens, dim, rank = shard.placement.tokens, shard.cut_dim, shard.placement.rank
    if not isinstance(tokens, Window):
        raise TypeError("A window of tokens that a mask has chosen is none of the sequence.")
    before = tokens.before(start, rank)
    local = shard.local.narrow(dim, before, tokens.before(stop, rank) - before)
    return SequenceShard(local, shard.placement._replace(tokens=tokens.within(start, stop)))


def _plain_window(shard: SequenceShard) -> bool:
    return not shard.placement.merged and isinstance(shard.placement.tokens, Window)


@handles(aten.slice.Tensor)
def _slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard, dim, start, end, step = by_name(func, args, kwargs).values()
    if dim % shard.ndim != shard.cut_dim:
        return shard.like(func(shard.local, *args[1:], **kwargs))
    if step != 1:
        return NotImplemented
    size = shard.placement.size
    first, last = _bounds(start, end, size)
    if (first, last) == (0, size):
        return shard.like(shard.local)
    return _piece(shard, first, last) if _plain_window(shard) else NotImplemented


@handles(aten.slice_backward.default)
def _slice_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, sizes, dim, start, end, step = args
    if dim % grad.ndim != grad.cut_dim:
        return shapes.slice_backward(func, args, kwargs)
    size = sizes[dim]
    first, last = _bounds(start, end, size)
    if step != 1 or last - first != grad.placement.size:
        return NotImplemented
    if last - first == size:
        return grad.like(grad.local)
    if not _plain_window(grad):
        return NotImplemented
    inner: Window = grad.placement.tokens
    if inner.start < first or inner.start - first + size > inner.cut.length:
        return NotImplemented
    outer = inner.within(-first, size - first)
    shape = list(sizes)
    shape[grad.cut_dim] = outer.counts[grad.placement.rank]
    local = grad.local.new_zeros(shape)
    local.narrow(grad.cut_dim, outer.before(first, grad.placement.rank), grad.held).copy_(grad.local)
    return SequenceShard(local, grad.placement._replace(tokens=outer))


@handles(
    aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default
)
def _split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard, asked, dim = list(by_name(func, args, kwargs).values())[:3]
    if dim % shard.ndim != shard.cut_dim:
        return along.along_others(func, args, kwargs)
    if not _plain_window(shard):
        return NotImplemented
    size = shard.placement.size
    ends = [*range(asked, size, asked), size] if isinstance(asked, int) else list(itertools.accumulate(asked))
    return [_piece(shard, start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


@handles(aten.select.int)
def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard, dim, index = args
    dim %= shard.ndim
    if dim != shard.cut_dim:
        return shard.like(func(shard.local, dim, index), shard.cut_dim - (dim < shard.cut_dim))
    return NotImplemented


@handles(aten.cat.default, aten.stack.default)
def _join(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parts, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    first = first_shown(parts)
    if func is aten.stack.default or dim % first.ndim != first.cut_dim:
        return shapes.join(func, args, kwargs)
    return _consecutive(parts, first.cut_dim)


def _consecutive(parts: Sequence[Tensor], dim: int) -> Any:
    """Windows that follow each other are one; the gradient of a tensor that was split comes so."""
    ends = list(itertools.accumulate(part.shape[dim] for part in parts))
    start, placement = None, None
    for part, end in zip(parts, ends, strict=True):
        if not isinstance(part, SequenceShard):
            continue
        if not _plain_window(part) or part.cut_dim != dim:
            return NotImplemented
        tokens = part.placement.tokens
        begins = tokens.start - (end - tokens.size)  # type: ignore[attr-defined]
        if placement is not None and (begins != start or tokens.cut != placement.tokens.cut):  # type: ignore[attr-defined]
            return NotImplemented
        start, placement = begins, part.placement
    if placement is None or start is None or start < 0:
        return NotImplemented
    tokens = placement.tokens
    if not isinstance(tokens, Window) or start + ends[-1] > tokens.cut.length:
        return NotImplemented
    whole = tokens.within(start - tokens.start, start - tokens.start + ends[-1])
    locals_ = []
    for part, end in zip(parts, ends, strict=True):
        inside = whole.within(end - part.shape[dim], end)
        held = isinstance(part, SequenceShard)
        locals_.append(part.local if held else inside.part(part, dim, placement.rank))  # type: ignore[attr-defined]
    return SequenceShard(torch.cat(locals_, dim), placement._replace(tokens=whole))


@handles(aten._to_copy.default)
def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On another device its ranks could not reach each other."""
    from lightning_5d.shown.elementwise import elementwise

    device = kwargs.get("device")
    if device is not None and torch.device(device).type != args[0].device.type:
        return NotImplemented
    return elementwise(func, args, kwargs)


@handles(aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype)
def _random_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Random numbers are those that one process would draw: plain ones."""
    return func(torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device), *args[1:], **kwargs)

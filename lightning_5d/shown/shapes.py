"""Views, pieces and joins along the dimensions that are whole: each rank does them on its part."""

from __future__ import annotations

from typing import Any

import torch

from lightning_5d.shown.registry import EVERY
from lightning_5d.shown.tensor import ShownTensor, first_shown

aten = torch.ops.aten


@EVERY.handles(aten.slice_backward.default)
def slice_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Zeros around a piece, along another dimension than the one that is cut."""
    grad, sizes, dim, *rest = args
    if dim % grad.ndim == grad.cut_dim:
        return NotImplemented
    return grad.like(func(grad.local, grad.local_shape(sizes, grad.cut_dim), dim, *rest))


@EVERY.handles(aten.select_backward.default)
def _select_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, sizes, dim, index = args
    dim %= len(sizes)
    place = grad.cut_dim + (dim <= grad.cut_dim)
    return grad.like(func(grad.local, grad.local_shape(sizes, place), dim, index), place)


@EVERY.handles(aten.unsqueeze.default)
def _unsqueeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard, dim = args
    place = dim % (shard.ndim + 1)
    return shard.like(func(shard.local, dim), shard.cut_dim + (place <= shard.cut_dim))


@EVERY.handles(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard: ShownTensor = args[0]
    asked = range(shard.ndim) if len(args) == 1 else [args[1]] if isinstance(args[1], int) else args[1]
    gone = [d % shard.ndim for d in asked if shard.shape[d] == 1]
    if shard.cut_dim in gone:
        return NotImplemented
    return shard.like(torch.squeeze(shard.local, gone), shard.cut_dim - sum(d < shard.cut_dim for d in gone))


@EVERY.handles(aten.transpose.int)
def _transpose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard, one, other = args
    one, other = one % shard.ndim, other % shard.ndim
    return shard.like(func(shard.local, one, other), {one: other, other: one}.get(shard.cut_dim, shard.cut_dim))


@EVERY.handles(aten.t.default)
def _t(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].like(func(args[0].local), args[0].ndim - 1 - args[0].cut_dim)


@EVERY.handles(aten.permute.default)
def _permute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard, order = args
    return shard.like(func(shard.local, order), [d % shard.ndim for d in order].index(shard.cut_dim))


@EVERY.handles(aten.expand.default)
def _expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard, sizes = args[:2]
    dim = shard.cut_dim + len(sizes) - shard.ndim
    if sizes[dim] not in (-1, shard.shape[shard.cut_dim]):
        return NotImplemented
    return shard.like(func(shard.local, shard.local_shape(sizes, dim), **kwargs), dim)


@EVERY.handles(aten.unbind.int)
def _unbind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard: ShownTensor = args[0]
    dim = (args[1] if len(args) > 1 else 0) % shard.ndim
    if dim == shard.cut_dim:
        return NotImplemented
    return [shard.like(part, shard.cut_dim - (dim < shard.cut_dim)) for part in func(shard.local, dim)]


@EVERY.handles(aten.cat.default, aten.stack.default)
def join(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Parts one after the other, or in a new dimension."""
    parts, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    first = first_shown(parts)
    kind, place = type(first), first.cut_dim
    if any(part.ndim != first.ndim or part.shape[place] != first.shape[place] for part in parts):
        return NotImplemented
    if any(isinstance(part, kind) and not first.matches(part) for part in parts):
        return NotImplemented
    stacked = func is aten.stack.default
    dim %= first.ndim + stacked
    if dim == place and not stacked:
        return NotImplemented
    locals_ = [part.local if isinstance(part, kind) else first.part(part, place) for part in parts]
    return first.like(func(locals_, dim), place + (stacked and dim <= place))


@EVERY.handles(aten.new_zeros.default, aten.new_empty.default, aten.new_full.default, aten.new_ones.default)
def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor of another shape. One that may be cut in the same way is: it may become the gradient of what rows were taken of."""
    shard, sizes, *rest = args
    dim = len(sizes) - (shard.ndim - shard.cut_dim)
    if dim < 0 or sizes[dim] != shard.shape[shard.cut_dim]:
        return func(shard.held_part, sizes, *rest, **kwargs)
    return shard.like(func(shard.local, shard.local_shape(sizes, dim), *rest, **kwargs), dim)


@EVERY.handles(aten.as_strided.default)
def _as_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise NotImplementedError(
        f"{type(first_shown(args)).__name__}: what several ranks hold parts of has no memory to give a view by strides of. If this"
        " comes from an in-place operation on a part of it (x[...] = value, x[...].add_(value)), use torch.where or masked_fill."
    )

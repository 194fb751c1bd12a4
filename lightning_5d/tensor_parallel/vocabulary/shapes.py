"""Views, pieces and joins along the leading dimensions: each rank does them on its columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_5d.tensor_parallel.vocabulary.registry import by_name, handles
from lightning_5d.tensor_parallel.vocabulary.shard import VocabularyShard

aten = torch.ops.aten


def vocabulary_after(before: Sequence[int], dim: int, after: Sequence[int]) -> int | None:
    """Where a dimension is after a tensor's shape has changed by a view, or ``None`` if it is not there any more.

    Args:
        before: The shape.
        dim: The dimension, in it.
        after: The new shape, of as many elements.
    """
    front, back = math.prod(before[:dim]), math.prod(before[dim + 1 :])
    for place, size in enumerate(after):
        if size == before[dim] and math.prod(after[:place]) == front and math.prod(after[place + 1 :]) == back:
            return place
    return None


def _local_shape(shape: Sequence[int], dim: int, width: int) -> list[int]:
    return [width if d == dim else size for d, size in enumerate(shape)]


@handles(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_copy.default)
def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard: VocabularyShard = args[0]
    shape = torch.empty(shard.shape, device="meta").reshape(args[1]).shape
    dim = vocabulary_after(shard.shape, shard.vocabulary_dim, shape)
    if dim is None:
        return NotImplemented
    # The shard shows strides without holes, those of `local` may have some.
    return shard.like(shard.local.reshape(_local_shape(shape, dim, shard.width)), dim)


@handles(aten._reshape_alias.default)
def _reshape_alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _view(func, args[:2], {})


@handles(aten.slice.Tensor)
def _slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard, dim, start, end, step = by_name(func, args, kwargs).values()
    if dim % shard.ndim != shard.vocabulary_dim:
        return shard.like(func(shard.local, *args[1:], **kwargs))
    if step == 1 and start in (0, None) and (end is None or end >= shard.vocabulary):
        return shard.like(shard.local)
    return NotImplemented


@handles(aten.slice_backward.default)
def _slice_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, sizes, dim, *rest = args
    if dim % grad.ndim == grad.vocabulary_dim:
        return NotImplemented
    return grad.like(func(grad.local, _local_shape(sizes, grad.vocabulary_dim, grad.width), dim, *rest))


@handles(aten.select.int)
def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard, dim, index = args
    dim %= shard.ndim
    if dim != shard.vocabulary_dim:
        return shard.like(func(shard.local, dim, index), shard.vocabulary_dim - (dim < shard.vocabulary_dim))
    if not -shard.vocabulary <= index < shard.vocabulary:
        raise IndexError(
            f"index {index} is out of bounds for dimension {dim} with size {shard.vocabulary}"
        )  # as torch says it
    own, absent = shard.owned(torch.tensor(index % shard.vocabulary, device=shard.device))
    return shard.axis.sum(shard.local.select(dim, int(own)).masked_fill(absent, 0))


@handles(aten.select_backward.default)
def _select_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, sizes, dim, index = args
    dim %= len(sizes)
    vocabulary = grad.vocabulary_dim + (dim <= grad.vocabulary_dim)
    return grad.like(func(grad.local, _local_shape(sizes, vocabulary, grad.width), dim, index), vocabulary)


@handles(aten.unsqueeze.default)
def _unsqueeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard, dim = args
    place = dim % (shard.ndim + 1)
    return shard.like(func(shard.local, dim), shard.vocabulary_dim + (place <= shard.vocabulary_dim))


@handles(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard: VocabularyShard = args[0]
    asked = range(shard.ndim) if len(args) == 1 else [args[1]] if isinstance(args[1], int) else args[1]
    gone = [d % shard.ndim for d in asked if shard.shape[d] == 1 and d % shard.ndim != shard.vocabulary_dim]
    return shard.like(
        torch.squeeze(shard.local, gone), shard.vocabulary_dim - sum(d < shard.vocabulary_dim for d in gone)
    )


@handles(aten.transpose.int)
def _transpose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard, one, other = args
    one, other = one % shard.ndim, other % shard.ndim
    return shard.like(
        func(shard.local, one, other), {one: other, other: one}.get(shard.vocabulary_dim, shard.vocabulary_dim)
    )


@handles(aten.t.default)
def _t(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].like(func(args[0].local), args[0].ndim - 1 - args[0].vocabulary_dim)


@handles(aten.permute.default)
def _permute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard, order = args
    return shard.like(func(shard.local, order), [d % shard.ndim for d in order].index(shard.vocabulary_dim))


@handles(aten.expand.default)
def _expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard, sizes = args[:2]
    dim = shard.vocabulary_dim + len(sizes) - shard.ndim
    if sizes[dim] not in (-1, shard.vocabulary):
        return NotImplemented
    return shard.like(func(shard.local, _local_shape(sizes, dim, shard.width), **kwargs), dim)


@handles(
    aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default,
    aten.cumsum.default, aten.cumprod.default, aten.flip.default, aten.index_select.default, aten.sort.default, aten.sort.stable,
    aten.roll.default,
)  # fmt: skip
def _along_others(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operations along dimensions that stay, if the vocabulary is not one of them."""
    given = by_name(func, args, kwargs)
    shard, asked = given["self"], given.get("dims", given.get("dim"))
    dims = [asked] if isinstance(asked, int) else list(asked or ())
    if not dims or shard.vocabulary_dim in [d % shard.ndim for d in dims] or not isinstance(shard, VocabularyShard):
        return NotImplemented
    result = func(shard.local, *args[1:], **kwargs)
    return shard.like(result) if isinstance(result, Tensor) else type(result)(map(shard.like, result))


@handles(aten.unbind.int)
def _unbind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard: VocabularyShard = args[0]
    dim = (args[1] if len(args) > 1 else 0) % shard.ndim
    if dim == shard.vocabulary_dim:
        return NotImplemented
    return [shard.like(part, shard.vocabulary_dim - (dim < shard.vocabulary_dim)) for part in func(shard.local, dim)]


@handles(aten.cat.default, aten.stack.default)
def _join(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parts, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    first = next(part for part in parts if isinstance(part, VocabularyShard))
    if any(part.ndim != first.ndim or part.shape[first.vocabulary_dim] != first.vocabulary for part in parts):
        return NotImplemented
    if any(isinstance(part, VocabularyShard) and part.vocabulary_dim != first.vocabulary_dim for part in parts):
        return NotImplemented
    stacked = func is aten.stack.default
    dim %= first.ndim + stacked
    if dim == first.vocabulary_dim and not stacked:
        return NotImplemented
    locals_ = [p.local if isinstance(p, VocabularyShard) else first.part(p, first.vocabulary_dim) for p in parts]
    return first.like(func(locals_, dim), first.vocabulary_dim + (stacked and dim <= first.vocabulary_dim))


@handles(aten.new_zeros.default, aten.new_empty.default, aten.new_full.default, aten.new_ones.default)
def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor of another shape. With a vocabulary it is again held in columns: the gradient of what rows were taken of."""
    shard, sizes, *rest = args
    dim = len(sizes) - (shard.ndim - shard.vocabulary_dim)
    if dim < 0 or sizes[dim] != shard.vocabulary:
        return func(shard.local, sizes, *rest, **kwargs)
    return shard.like(func(shard.local, _local_shape(sizes, dim, shard.width), *rest, **kwargs), dim)


@handles(aten.as_strided.default)
def _as_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise NotImplementedError(
        "Logits that several ranks hold the columns of have no memory to give a view by strides of. If this comes from an"
        " in-place operation on a part of them (logits[...] = value, logits[...].add_(value)), use torch.where or masked_fill."
    )

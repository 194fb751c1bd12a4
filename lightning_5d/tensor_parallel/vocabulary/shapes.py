"""Views and pieces of logits, which may go through the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

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


@handles(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_copy.default)
def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard: VocabularyShard = args[0]
    shape = torch.empty(shard.shape, device="meta").reshape(args[1]).shape
    dim = vocabulary_after(shard.shape, shard.vocabulary_dim, shape)
    if dim is None:
        return NotImplemented
    # The shard shows strides without holes, those of `local` may have some.
    return shard.like(shard.local.reshape(shard.local_shape(shape, dim)), dim)


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

"""Sums, extremes and norms: each rank reduces its columns, and what is left without a vocabulary is reduced over ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_5d.tensor_parallel.vocabulary.registry import by_name, handles
from lightning_5d.tensor_parallel.vocabulary.shard import VocabularyShard

aten = torch.ops.aten


def _dims(shard: VocabularyShard, asked: Any) -> list[int]:
    """Dimensions that a reduction is asked for; all of them for ``None`` and ``[]``."""
    if asked is None or asked == []:
        return list(range(shard.ndim))
    return [d % shard.ndim for d in ([asked] if isinstance(asked, int) else asked)]


def _stays(shard: VocabularyShard, reduced: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    """What a reduction over other dimensions leaves.

    One number per column is no logits any more but a statistic, which may be kept (in the state of a metric) and sent: it is made
    plain.
    """
    if reduced.ndim == 1:
        return shard.like(reduced, 0).gathered()
    return shard.like(reduced, shard.vocabulary_dim - (0 if keepdim else sum(d < shard.vocabulary_dim for d in dims)))


def _columns(shard: VocabularyShard, neutral: float | bool) -> Tensor:
    """Columns of which there is at least one."""
    if shard.held:
        return shard.columns
    return torch.full_like(shard.local.narrow(shard.vocabulary_dim, 0, 1), neutral)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


@handles(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = by_name(func, args, kwargs)
    shard, keepdim = given["self"], given.get("keepdim", False)
    dims = _dims(shard, given.get("dim"))
    mean = func in (aten.mean.default, aten.mean.dim)
    exact = shard.dtype.is_floating_point or shard.dtype.is_complex
    dtype = given["dtype"] or (shard.dtype if exact or mean else torch.int64)
    if shard.vocabulary_dim not in dims:
        return _stays(shard, func(shard.local, *args[1:], **kwargs), dims, keepdim)
    count = math.prod(shard.shape[d] for d in dims) if mean else 1
    summed = shard.axis.sum(shard.columns.sum(dims, keepdim=keepdim, dtype=_wide(dtype)))
    return (summed / count if mean else summed).to(dtype)


@handles(aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
def _extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = by_name(func, args, kwargs)
    shard, keepdim = given["self"], given.get("keepdim", False)
    dims = _dims(shard, given.get("dim"))
    largest = func in (aten.amax.default, aten.max.default)
    reduce = torch.amax if largest else torch.amin
    if shard.vocabulary_dim not in dims:
        return _stays(shard, reduce(shard.local, dims, keepdim), dims, keepdim)
    if shard.dtype is torch.bool:
        return NotImplemented
    limits = torch.finfo(shard.dtype) if shard.dtype.is_floating_point else torch.iinfo(shard.dtype)
    neutral = float("inf") if shard.dtype.is_floating_point else limits.max
    columns = _columns(shard, -neutral if largest else neutral)
    # Gathered, not reduced on the way: the backends' own largest may lose a NaN.
    return reduce(shard.axis.gather(reduce(columns, dims, keepdim)[None], 0), 0)


@handles(aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims)
def _truth(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = by_name(func, args, kwargs)
    shard, keepdim = given["self"], given.get("keepdim", False)
    dims = _dims(shard, given.get("dim"))
    if shard.vocabulary_dim not in dims:
        return _stays(shard, func(shard.local, *args[1:], **kwargs), dims, keepdim)
    everywhere = func in (aten.all.default, aten.all.dim, aten.all.dims)
    columns = _columns(shard, everywhere)
    found = (~columns.bool() if everywhere else columns.bool()).sum(dims, keepdim=keepdim, dtype=torch.int32)
    some = shard.axis.sum(found, "max") > 0
    return ~some if everywhere else some


@handles(aten.linalg_vector_norm.default)
def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = by_name(func, args, kwargs)
    shard, order, keepdim = given["self"], given["ord"], given["keepdim"]
    dims = _dims(shard, given["dim"])
    if shard.vocabulary_dim not in dims:
        return _stays(shard, func(shard.local, *args[1:], **kwargs), dims, keepdim)
    if order <= 0:
        return NotImplemented
    dtype = given["dtype"] or shard.dtype
    local = torch.linalg.vector_norm(_columns(shard, 0.0), order, dims, keepdim, dtype=_wide(dtype))
    return torch.linalg.vector_norm(shard.axis.gather(local[None], 0), order, 0).to(dtype)

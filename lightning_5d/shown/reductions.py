"""Sums, extremes and norms: each rank reduces its part, and what is left without the dimension that is cut is reduced over ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_5d.shown.registry import EVERY, by_name
from lightning_5d.shown.tensor import ShownTensor

aten = torch.ops.aten


def dims_of(shard: ShownTensor, asked: Any) -> list[int]:
    """Dimensions that a reduction is asked for; all of them for ``None`` and ``[]``."""
    if asked is None or asked == []:
        return list(range(shard.ndim))
    return [d % shard.ndim for d in ([asked] if isinstance(asked, int) else asked)]


def _stays(shard: ShownTensor, reduced: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    """What a reduction over other dimensions leaves."""
    return shard.statistic(reduced, shard.cut_dim - (0 if keepdim else sum(d < shard.cut_dim for d in dims)))


def some_part(shard: ShownTensor, neutral: float | bool) -> Tensor:
    """What a rank holds, at least one entry of it."""
    if shard.held:
        return shard.held_part
    return shard.local.new_full([1 if d == shard.cut_dim else size for d, size in enumerate(shard.shape)], neutral)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are made."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


@EVERY.handles(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = by_name(func, args, kwargs)
    shard, keepdim = given["self"], given.get("keepdim", False)
    dims = dims_of(shard, given.get("dim"))
    mean = func in (aten.mean.default, aten.mean.dim)
    exact = shard.dtype.is_floating_point or shard.dtype.is_complex
    dtype = given["dtype"] or (shard.dtype if exact or mean else torch.int64)
    if shard.cut_dim not in dims:
        return _stays(shard, func(shard.local, *args[1:], **kwargs), dims, keepdim)
    count = math.prod(shard.shape[d] for d in dims) if mean else 1
    summed = shard.summed(shard.held_part.sum(dims, keepdim=keepdim, dtype=wide(dtype)))
    return (summed / count if mean else summed).to(dtype)


@EVERY.handles(aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
def _extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = by_name(func, args, kwargs)
    shard, keepdim = given["self"], given.get("keepdim", False)
    dims = dims_of(shard, given.get("dim"))
    largest = func in (aten.amax.default, aten.max.default)
    reduce = torch.amax if largest else torch.amin
    if shard.cut_dim not in dims:
        return _stays(shard, reduce(shard.local, dims, keepdim), dims, keepdim)
    if shard.dtype is torch.bool:
        return NotImplemented
    limits = torch.finfo(shard.dtype) if shard.dtype.is_floating_point else torch.iinfo(shard.dtype)
    neutral = float("inf") if shard.dtype.is_floating_point else limits.max
    part = some_part(shard, -neutral if largest else neutral)
    # Gathered, not reduced on the way: the backends' own largest may lose a NaN.
    return reduce(shard.collected(reduce(part, dims, keepdim)), 0)


@EVERY.handles(aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims)
def _truth(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = by_name(func, args, kwargs)
    shard, keepdim = given["self"], given.get("keepdim", False)
    dims = dims_of(shard, given.get("dim"))
    if shard.cut_dim not in dims:
        return _stays(shard, func(shard.local, *args[1:], **kwargs), dims, keepdim)
    everywhere = func in (aten.all.default, aten.all.dim, aten.all.dims)
    part = some_part(shard, everywhere)
    found = (~part.bool() if everywhere else part.bool()).sum(dims, keepdim=keepdim, dtype=torch.int32)
    some = shard.summed(found, "max") > 0
    return ~some if everywhere else some


@EVERY.handles(aten.linalg_vector_norm.default)
def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = by_name(func, args, kwargs)
    shard, order, keepdim = given["self"], given["ord"], given["keepdim"]
    dims = dims_of(shard, given["dim"])
    if shard.cut_dim not in dims:
        return _stays(shard, func(shard.local, *args[1:], **kwargs), dims, keepdim)
    if order <= 0:
        return NotImplemented
    dtype = given["dtype"] or shard.dtype
    local = torch.linalg.vector_norm(some_part(shard, 0.0), order, dims, keepdim, dtype=wide(dtype))
    return torch.linalg.vector_norm(shard.collected(local), order, 0).to(dtype)


@EVERY.handles(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def _count_nonzero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = by_name(func, args, kwargs)
    return aten.sum.dim_IntList(aten.ne.Scalar(given["self"], 0), given["dim"], False)

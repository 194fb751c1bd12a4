"""Sums and means over tokens, whose gradients stay with the ranks, and the log of a sum of exponentials."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_5d.context_parallel.shown.registry import answers, by_name, handles
from lightning_5d.context_parallel.shown.shard import SequenceShard, held
from lightning_5d.context_parallel.shown.totals import total
from lightning_5d.shown import along
from lightning_5d.shown.reductions import dims_of, some_part, wide

aten = torch.ops.aten


@answers(torch.sum, Tensor.sum, torch.mean, Tensor.mean)
def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The whole gradient of a mean would be written in full before a rank takes its part."""

    def call(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **others: Any) -> Any:
        if others or not (isinstance(input, SequenceShard) and input.requires_grad and torch.is_grad_enabled()):
            return NotImplemented
        dims = dims_of(input, list(dim) if isinstance(dim, tuple) else dim)
        if input.cut_dim not in dims:
            return NotImplemented
        kind = dtype or input.dtype
        summed = total(held(input).sum(dims, keepdim=keepdim, dtype=wide(kind)), input.axis)
        if func in (torch.mean, Tensor.mean):
            summed = summed / math.prod(input.shape[d] for d in dims)
        return summed.to(kind)

    return call(*args, **kwargs)


@handles(aten.logsumexp.default)
def _logsumexp(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = by_name(func, args, kwargs)
    shard, keepdim = given["self"], given["keepdim"]
    dims = dims_of(shard, given["dim"])
    if shard.cut_dim not in dims or not shard.dtype.is_floating_point:
        return along.along_others(func, args, kwargs)
    local = torch.logsumexp(some_part(shard, -math.inf).to(wide(shard.dtype)), dims, keepdim)
    return torch.logsumexp(shard.collected(local), 0).to(shard.dtype)

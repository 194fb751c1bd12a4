"""Matrix products with one row for each token, and those that add up tokens: gradients of weights that are used outside of doors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_5d.context_parallel.shown.registry import handles
from lightning_5d.context_parallel.shown.shard import SequenceShard

aten = torch.ops.aten


@handles(aten.mm.default, aten.bmm.default)
def _product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    left, right = args
    behind = {id(x): x.cut_dim - x.ndim for x in args if isinstance(x, SequenceShard)}
    one, other = behind.get(id(left)), behind.get(id(right))
    if one == -3 or other == -3:
        return _matched(func, left, right)
    if one == -2 and other is None:
        return left.like(func(left.local, right))
    if other == -1 and one is None:
        return right.like(func(left, right.local))
    if one in (-1, None) and other in (-2, None):
        shard = left if one is not None else right
        if one is not None and other is not None and not left.placement.matches(right.placement):
            return NotImplemented
        return shard.summed(func(_local(left, shard, -1), _local(right, shard, -2)))
    return NotImplemented


def _matched(func: Any, left: Tensor, right: Tensor) -> Any:
    """Matrices of which each rank has some."""
    shard = left if isinstance(left, SequenceShard) else right
    if not isinstance(shard, SequenceShard) or shard.cut_dim:
        return NotImplemented
    other = right if shard is left else left
    if isinstance(other, SequenceShard) and (other.cut_dim or not shard.placement.matches(other.placement)):
        return NotImplemented
    return shard.like(func(_local(left, shard, 0), _local(right, shard, 0)))


def _local(x: Tensor, shard: SequenceShard, dim: int) -> Tensor:
    return x.local if isinstance(x, SequenceShard) else shard.part(x, dim % x.ndim)


@handles(aten.addmm.default)
def _addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bias, left, right = args
    if kwargs.get("beta", 1) != 1 or kwargs.get("alpha", 1) != 1:
        return NotImplemented
    return aten.add.Tensor(aten.mm.default(left, right), bias)

"""Operations that treat every element alike: each rank does its columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_5d.tensor_parallel.vocabulary.registry import handles
from lightning_5d.tensor_parallel.vocabulary.shard import VocabularyShard

aten = torch.ops.aten

# Elementwise, but not tagged so in torch 2.13.
_UNTAGGED = frozenset({
    aten._to_copy.default, aten.copy_.default, aten.masked_fill.Tensor, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor,
    aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.rsub.Tensor, aten.rsub.Scalar, aten.softplus_backward.default,
    aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default,
    aten.full_like.default, aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.clone.default,
})  # fmt: skip


def is_elementwise(func: Any) -> bool:
    """Whether an operation gives, for each element, a result that depends on that element and the numbers given to it alone."""
    return func in _UNTAGGED or (
        torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
    )


def elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an elementwise operation on the columns; of plain tensors that have a vocabulary the same columns are taken."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    shards = [tensor for tensor in tensors if isinstance(tensor, VocabularyShard)]
    first = shards[0]
    behind = first.ndim - first.vocabulary_dim  # tensors are lined up at their last dimensions
    if any(shard.ndim - shard.vocabulary_dim != behind or shard.vocabulary != first.vocabulary for shard in shards):
        return NotImplemented
    mutable = func._schema.is_mutable
    target = kwargs.get("out", args[0]) if mutable else None
    if mutable and not isinstance(target, VocabularyShard):
        return NotImplemented

    def local(value: Any) -> Any:
        if isinstance(value, VocabularyShard):
            return value.local
        if not isinstance(value, Tensor) or value.ndim < behind:
            return value
        size = value.shape[value.ndim - behind]
        if size == first.vocabulary:
            return first.part(value, value.ndim - behind)
        if size != 1:
            raise RuntimeError(
                f"The size of tensor a ({first.vocabulary}) must match the size of tensor b ({size}) at non-singleton dimension"
                f" {max(tensor.ndim for tensor in tensors) - behind}"
            )
        return value

    result = func(*tree_map(local, args), **tree_map(local, kwargs))
    if mutable:
        torch.autograd.graph.increment_version(target.local)  # type: ignore[union-attr]
        return target
    return tree_map(
        lambda value: first.like(value, value.ndim - behind) if isinstance(value, Tensor) else value, result
    )


@handles(aten.log_sigmoid_forward.default)
def _log_sigmoid(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    output, _ = func(args[0].local)
    return args[0].like(output), args[0].local.new_empty(
        0
    )  # a buffer for the backward formula, which ours does not need


@handles(aten.log_sigmoid_backward.default)
def _log_sigmoid_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, logits, _ = args
    return aten.mul.Tensor(grad, aten.sigmoid.default(aten.neg.default(logits)))


@handles(aten.equal.default)
def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    one, other = args
    return one.shape == other.shape and bool(aten.all.default(aten.eq.Tensor(one, other)))


@handles(aten.allclose.default)
def _allclose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return bool(aten.all.default(aten.isclose.default(*args, **kwargs)))

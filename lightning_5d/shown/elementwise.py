"""Operations that treat every element alike: each rank does its part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_5d.shown.arguments import tensors_in, with_tensors
from lightning_5d.shown.registry import EVERY
from lightning_5d.shown.tensor import first_shown

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
    """Runs an elementwise operation on the parts; of plain tensors that have the dimension that is cut the same part is taken."""
    first = first_shown((args, kwargs))
    kind = type(first)
    tensors = list(tensors_in((args, kwargs)))
    behind = first.ndim - first.cut_dim  # tensors are lined up at their last dimensions
    size = first.shape[first.cut_dim]
    for tensor in tensors:
        if isinstance(tensor, kind):
            if tensor is not first and not first.matches(tensor):
                return NotImplemented
        elif size == 1 and tensor.ndim >= behind and tensor.shape[-behind] != 1:
            return NotImplemented
    mutable = func._schema.is_mutable
    target = kwargs.get("out", args[0]) if mutable else None
    if mutable and not isinstance(target, kind):
        return NotImplemented

    def local(value: Tensor) -> Tensor:
        if isinstance(value, kind):
            return value.local
        if value.ndim < behind:
            return value
        found = value.shape[-behind]
        if found == size:
            return first.part(value, value.ndim - behind)
        if found != 1:
            raise RuntimeError(
                f"The size of tensor a ({size}) must match the size of tensor b ({found}) at non-singleton dimension"
                f" {max(tensor.ndim for tensor in tensors) - behind}"
            )
        return value

    result = func(*with_tensors(args, local), **with_tensors(kwargs, local))
    if mutable:
        torch.autograd.graph.increment_version(target.local)  # type: ignore[union-attr]
        return target
    return with_tensors(result, lambda value: first.like(value, value.ndim - behind))


@EVERY.handles(aten.log_sigmoid_forward.default)
def _log_sigmoid(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    output, _ = func(args[0].local)
    return args[0].like(output), args[0].local.new_empty(
        0
    )  # a buffer for the backward formula, which ours does not need


@EVERY.handles(aten.log_sigmoid_backward.default)
def _log_sigmoid_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, logits, _ = args
    return aten.mul.Tensor(grad, aten.sigmoid.default(aten.neg.default(logits)))


@EVERY.handles(aten.equal.default)
def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    one, other = args
    return one.shape == other.shape and bool(aten.all.default(aten.eq.Tensor(one, other)))


@EVERY.handles(aten.allclose.default)
def _allclose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return bool(aten.all.default(aten.isclose.default(*args, **kwargs)))

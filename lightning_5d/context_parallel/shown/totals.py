"""Sums over the ranks with a graph: what they add up is a gradient that each already has."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from lightning_5d.shown.tensor import over_ranks
from lightning_5d.tensor_parallel.axis import TensorAxis


def total(local: Tensor, axis: TensorAxis) -> Tensor:
    """The sum over the ranks of what each has made of its tokens, the same on all.

    Backward: the gradient of the sum is the same on all ranks, and that of each summand.
    """
    if not (local.requires_grad and torch.is_grad_enabled()):
        return over_ranks(axis, local)
    return cast(Tensor, _Total.apply(local, axis))  # type: ignore[no-untyped-call]


class _Total(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, local: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return over_ranks(axis, local)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Spread.apply(grad, ctx.axis), None  # type: ignore[no-untyped-call]


class _Spread(torch.autograd.Function):
    """What all ranks have, as each will use it for its tokens; backward: the sum over the ranks."""

    @staticmethod
    @override
    def forward(ctx: Any, whole: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return whole.view_as(whole)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return total(grad, ctx.axis), None

"""Between tokens with their choices and rows sorted by expert.

Legend: N tokens, K choices of each, S of these that are kept, D features, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Empty = Callable[[Sequence[int], Tensor], Tensor]
"""Uninitialised memory of a shape, of the dtype and on the device of a tensor."""


@dataclass(frozen=True)
class Permutation:
    """Which row is which choice of which token.

    Attributes:
        tokens: N.
        token_S: The token of each row.
        choice_S: The choice that each row is, of all N x K in the order of the tokens.
        place_S: The row of each kept choice, in the order of the tokens.
        bags_N: Where the choices of each token start in `place_S`.
        counts_E: Rows of each expert; on the CPU.
    """

    tokens: int
    token_S: Tensor
    choice_S: Tensor
    place_S: Tensor
    bags_N: Tensor
    counts_E: Tensor


def sort_choices(index_NK: Tensor, experts: int, kept_NK: Tensor | None = None) -> Permutation:
    """Sorts choices by expert, those of one expert by token.

    Args:
        index_NK: The experts of each token.
        experts: E.
        kept_NK: Those that are not left out.
    """
    tokens, choices = index_NK.shape
    index = index_NK.reshape(-1)
    if kept_NK is not None:
        index = torch.where(kept_NK.reshape(-1), index, experts)
    counts = torch.bincount(index, minlength=experts)
    counts_E = counts[:experts].cpu()
    rows = int(counts_E.sum())
    order = torch.argsort(index, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    if kept_NK is None:
        bags = torch.arange(tokens, device=index.device) * choices
    else:
        place = place[kept_NK.reshape(-1)]
        kept_N = kept_NK.sum(1)
        bags = kept_N.cumsum(0) - kept_N
    choice = order[:rows]
    return Permutation(tokens, choice // max(choices, 1), choice, place, bags, counts_E)


def gather_rows(hidden_ND: Tensor, permutation: Permutation, empty: Empty | None = None) -> Tensor:
    """The token of each row, (S, D).

    Args:
        hidden_ND: The tokens.
        permutation: Their rows.
        empty: Makes the memory of the result.
    """
    out: Tensor = _Gather.apply(hidden_ND, permutation, empty)  # type: ignore[no-untyped-call]
    return out


def weighted_sum(
    rows_SD: Tensor, weights_NK: Tensor, permutation: Permutation, dtype: torch.dtype, empty: Empty | None = None
) -> Tensor:
    """For each token the sum of its rows times their weights, (N, D); zero for one without rows.

    Args:
        rows_SD: Rows.
        weights_NK: Their weights.
        permutation: Whose they are.
        dtype: That of the result.
        empty: Makes the memory of the gradient of the rows.
    """
    out: Tensor = _WeightedSum.apply(rows_SD, weights_NK, permutation, dtype, empty)  # type: ignore[no-untyped-call]
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, permutation: Permutation, empty: Empty | None) -> Tensor:
        ctx.permutation = permutation
        return _take(hidden, permutation.token_S, empty)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _summed(grad, None, ctx.permutation, grad.dtype), None, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, permutation: Permutation, dtype: torch.dtype, empty: Empty | None
    ) -> Tensor:
        ctx.save_for_backward(rows if weights.requires_grad else None, weights)
        ctx.permutation, ctx.empty, ctx.dtype = permutation, empty, rows.dtype
        return _summed(rows, weights, permutation, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights = ctx.saved_tensors
        permutation: Permutation = ctx.permutation
        of_rows = of_weights = None
        grad_SD = _take(grad.to(ctx.dtype), permutation.token_S, ctx.empty)
        if ctx.needs_input_grad[1]:
            dots = (grad_SD * rows).sum(-1, dtype=weights.dtype)
            of_weights = torch.zeros_like(weights).view(-1).index_copy_(0, permutation.choice_S, dots)
            of_weights = of_weights.view(weights.shape)
        if ctx.needs_input_grad[0]:
            of_rows = grad_SD.mul_(weights.reshape(-1)[permutation.choice_S, None])
        return of_rows, of_weights, None, None, None


def _take(x: Tensor, index: Tensor, empty: Empty | None) -> Tensor:
    if empty is None:
        return x.index_select(0, index)
    return torch.index_select(x, 0, index, out=empty((len(index), x.shape[1]), x))


def _summed(rows: Tensor, weights: Tensor | None, permutation: Permutation, dtype: torch.dtype) -> Tensor:
    if weights is not None:
        rows = rows * weights.reshape(-1)[permutation.choice_S, None]
    return rows.new_zeros((permutation.tokens, rows.shape[1])).index_add_(0, permutation.token_S, rows).to(dtype)

"""Between tokens with their choices and rows sorted by expert.

Rows are the largest tensors of a layer of experts: there are K of them for each token. Of these functions the gather saves none, and the weighted sum
saves its input if the weights need a gradient, which depends on what came back; nothing is saved twice, or multiplied by the weights in
memory of its own. Legend: N tokens, K choices of each, S of these that are kept, D features, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_5d.hidden_operations import hidden_operations

Empty = Callable[[Sequence[int], Tensor], Tensor]
"""Uninitialised memory of a shape, of the dtype and on the device of a tensor."""


class Crossing(Protocol):
    """A way of rows to other ranks, forward, and of their gradients the other way, backward."""

    def start(self, rows: Tensor, *, gradients: bool) -> Tensor:
        """Lets them set out; returns a ticket without elements that stands for them in the graph."""

    def wait(self) -> Tensor:
        """What has arrived."""


# Elements that are worked on at a time: on a CPU, so that they are still in its cache for the next step.
_PIECE, _PIECE_ON_DEVICE = 1 << 18, 1 << 24


@dataclass(frozen=True)
class Permutation:
    """Which row is which choice of which token.

    Attributes:
        token_S: The token of each row.
        choice_S: The choice that each row is, of all N x K in the order of the tokens.
        place_S: The row of each kept choice, in the order of the tokens.
        bags_N: Where the choices of each token start in `place_S`.
        counts_E: Rows of each expert.
    """

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
    index = index_NK.reshape(-1).long()
    kinds = experts
    if kept_NK is not None:
        # What is left out comes last, as of an expert that nobody has.
        index, kinds = index.masked_fill(~kept_NK.reshape(-1), experts), experts + 1
    counts = index.new_zeros(kinds).scatter_add_(0, index, torch.ones_like(index))[:experts]
    choice = torch.argsort(index, stable=True)
    place = torch.empty_like(choice)
    place[choice] = torch.arange(len(choice), device=choice.device)
    if kept_NK is None:
        bags = torch.arange(tokens, device=index.device) * choices
    else:
        place = place[kept_NK.reshape(-1)]
        choice = choice[: len(place)]
        kept_N = kept_NK.sum(1)
        bags = kept_N.cumsum(0) - kept_N
    return Permutation(choice // max(choices, 1), choice, place, bags, counts)


def gather_rows(
    hidden_ND: Tensor, permutation: Permutation, empty: Empty | None = None, crossing: Crossing | None = None
) -> Tensor:
    """The token of each row, (S, D).

    Args:
        hidden_ND: The tokens.
        permutation: Their rows.
        empty: Makes the memory of the result.
        crossing: The way that rows take at once; then its ticket is returned in their place.
    """
    out: Tensor = _Gather.apply(hidden_ND, permutation, empty, crossing)  # type: ignore[no-untyped-call]
    return out


def weighted_sum(
    rows_SD: Tensor,
    weights_NK: Tensor,
    permutation: Permutation,
    dtype: torch.dtype,
    empty: Empty | None = None,
    crossing: Crossing | None = None,
) -> Tensor:
    """For each token the sum of its rows times their weights, (N, D); zero for one without rows. Formed in fp32.

    Args:
        rows_SD: Rows.
        weights_NK: Their weights, which are rounded to the dtype of the rows.
        permutation: Whose they are.
        dtype: That of the result.
        empty: Makes the memory of the gradient of the rows.
        crossing: The way that rows come by, if `rows_SD` is their ticket.
    """
    out: Tensor = _WeightedSum.apply(rows_SD, weights_NK, permutation, dtype, empty, crossing)  # type: ignore[no-untyped-call]
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, permutation: Permutation, empty: Empty | None, crossing: Crossing | None
    ) -> Tensor:
        ctx.permutation, ctx.crossing = permutation, crossing
        index = permutation.token_S
        with hidden_operations():
            if empty is None or not hidden.is_contiguous():
                rows = hidden.index_select(0, index)
            else:
                rows = torch.index_select(hidden, 0, index, out=empty((len(index), hidden.shape[1]), hidden))
        return rows if crossing is None else crossing.start(rows, gradients=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows = grad if ctx.crossing is None else ctx.crossing.wait()
        return _summed(rows, None, ctx.permutation), None, None, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        permutation: Permutation,
        dtype: torch.dtype,
        empty: Empty | None,
        crossing: Crossing | None,
    ) -> Tensor:
        ctx.crossing = crossing
        if crossing is not None:
            rows = crossing.wait()
        # A recomputation ends when it has all that was saved: not before this, then, with rows under way.
        ctx.save_for_backward(rows if weights.requires_grad else None, weights)
        ctx.permutation, ctx.empty, ctx.dtype = permutation, empty or _new, rows.dtype
        with hidden_operations():
            return _summed(rows, weights, permutation).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights = ctx.saved_tensors
        permutation: Permutation = ctx.permutation
        of_rows, of_weights = ctx.needs_input_grad[:2]
        if of_rows and ctx.crossing is not None:
            # Of a backward towards some weights only (`torch.autograd.grad`), that may end here: nobody would read what sets out.
            # Private; checked with torch 2.13.
            of_rows = torch._C._will_engine_execute_node(ctx.next_functions[0][0])
        grad = grad.to(ctx.dtype).contiguous()
        size, total = grad.shape[1], len(permutation.token_S)
        length = max(1, (_PIECE if grad.device.type == "cpu" else _PIECE_ON_DEVICE) // max(size, 1))
        weights_S1 = weights.reshape(-1)[permutation.choice_S].to(grad.dtype).unsqueeze(1)
        dots = grad.new_empty(total, dtype=torch.promote_types(grad.dtype, torch.float32)) if of_weights else None
        # All of them, or room for one piece after the other.
        grads = ctx.empty((total, size), grad) if of_rows else _new((min(length, total), size), grad)
        for start in range(0, total, length):
            stop = min(start + length, total)
            piece = grads[start:stop] if of_rows else grads[: stop - start]
            torch.index_select(grad, 0, permutation.token_S[start:stop], out=piece)
            if dots is not None:
                torch.sum(piece.to(dots.dtype) * rows[start:stop], -1, out=dots[start:stop])
            if of_rows:
                piece.mul_(weights_S1[start:stop])
        of_all = None
        if dots is not None:
            # It is zero for choices that were left out.
            of_all = dots.new_zeros(weights.numel()).index_copy_(0, permutation.choice_S, dots).view(weights.shape)
        if not of_rows:
            return None, of_all, None, None, None, None
        return (
            grads if ctx.crossing is None else ctx.crossing.start(grads, gradients=True),
            of_all,
            None,
            None,
            None,
            None,
        )


def _new(shape: Sequence[int], like: Tensor) -> Tensor:
    return like.new_empty(tuple(shape))


def _summed(rows: Tensor, weights: Tensor | None, permutation: Permutation) -> Tensor:
    """For each token the sum of its rows."""
    place = permutation.place_S
    if weights is not None:
        weights = weights.reshape(-1)
        if len(place) < len(weights):
            weights = weights[permutation.choice_S[place]]
        weights = weights.to(rows.dtype)
    # `torch.nn.functional.embedding_bag` without what it checks; it reads each row once, and adds 16-bit ones up in fp32.
    sums: Tensor = torch.embedding_bag(rows.contiguous(), place, permutation.bags_N, False, 0, False, weights)[0]
    return sums

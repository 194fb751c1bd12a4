"""Rows at the door of experts: which of them a rank of the tensor axis sends to experts, and how outputs come back.

Shape suffixes: N rows that the layer has on this rank, n rows that this rank sends, D hidden size, K choices of each row.
"""

# [Note: rows at the door of experts]
# t ranks of the tensor axis, g gradients. What is outside the door has, forward and backward, what the layers around it have there.
#
# | rows outside are | experts are | going in | coming out |
# |---|---|---|---|
# | the same on all ranks | whole | take 1/t of the rows; g: gather | gather; g: take |
# | each rank's own (a cut sequence) | whole | as they are | as they are |
# | the same on all ranks | cut over the axis | as they are; g: sum | sum; g: as they are |
# | each rank's own | cut over the axis | gather; g: scatter the sum | scatter the sum; g: gather |
#
# Weights of the choices go in as hidden states do: of experts that are cut each rank has a summand of a weight's gradient. Rows may be in
# any order inside, since each goes through experts alone; so pieces are put after each other as they come.
# Experts that are whole get each row from one rank, so the sum of their gradients over all ranks that have tokens is over all tokens. Experts
# that are cut get all rows of a microbatch on each rank of the axis, for the part of the weights that it has.
# A rank takes its rows in slices of ceil(N / t), of which the last ones are shorter, or empty: no rank has more than with any other split, and
# gathered slices follow each other as they lie in memory.

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_5d.first_derivatives import of_tensor_axis
from lightning_5d.parallelism import Problem
from lightning_5d.tensor_parallel.axis import Arriving, TensorAxis
from lightning_5d.tensor_parallel.layout import TensorLayout
from lightning_5d.tensor_parallel.pieces import Pieces
from lightning_5d.tensor_parallel.regions import leave

Experts = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""``(hidden_nD, index_nK, weights_nK, kept_nK) -> (n, D)``: what experts make of rows."""


def through_rows(
    hidden_ND: Tensor,
    index_NK: Tensor,
    weights_NK: Tensor,
    kept_NK: Tensor | None,
    experts: Experts,
    axis: TensorAxis | None,
    *,
    is_cut: bool = False,
    has_parts: bool = False,
) -> Tensor:
    """What experts make of a layer's rows, (N, D), where several ranks of the tensor axis have the layer.

    All of them call it together: with the same rows, or with as many of their own.

    Args:
        hidden_ND: The rows.
        index_NK: The experts of each.
        weights_NK: Their weights.
        kept_NK: Choices that are not left out; ``None`` for all.
        experts: Computes with the rows that this rank sends; called once, perhaps with no rows.
        axis: The ranks of the tensor axis; ``None`` if there is one.
        is_cut: Whether each rank has rows of its own, as between blocks with sequence parallelism. Else all have the same.
        has_parts: Whether each rank has a part of every expert, whose outputs add up. Else experts are whole.
    """
    if axis is None or axis.size == 1 or (is_cut and not has_parts):
        return experts(hidden_ND, index_NK, weights_NK, kept_NK)
    if has_parts and is_cut:
        pieces = Pieces(axis, 0, len(hidden_ND) * axis.size)
        arriving = axis.start_gather(_packed(index_NK, kept_NK), 0)
        hidden, weights = _in(_Gather, hidden_ND, weights_NK, pieces)
        index, kept = _unpacked(arriving.wait(), kept_NK is not None)
        return leave(experts(hidden, index, weights, kept), axis, pieces)
    if has_parts:
        hidden, weights = _in(_Share, hidden_ND, weights_NK, axis)
        return leave(experts(hidden, index_NK, weights, kept_NK), axis)
    pieces = Pieces(axis, 0, len(hidden_ND))
    hidden, weights = _in(_Take, hidden_ND, weights_NK, pieces)
    index, kept = own(index_NK, pieces), None if kept_NK is None else own(kept_NK, pieces)
    return _joined(experts(hidden, index, weights, kept), pieces)


def region_problems(names: Iterable[str], layout: TensorLayout) -> list[Problem]:
    """What is wrong with experts inside of regions, where a rank's rows are whole, but gradients are summands and outputs are added up.

    Args:
        names: Of modules that hold experts.
        layout: What the tensor axis makes of the whole module.
    """
    doors = [region.name for region in layout.regions if region.door == "module"]
    return [
        Problem(
            f"The experts {name} are inside of {region}, whose other layers the plan of TensorParallel cuts.",
            f"Put those layers into a module of their own beside the experts, or leave them out of the plan ({region}.*).",
        )
        for name in names
        for region in doors
        if name.startswith(f"{region}.")
    ]


def own(x: Tensor, pieces: Pieces) -> Tensor:
    """This rank's rows of those that all ranks have: a view, shorter than `Pieces.length` where there are not as many."""
    start = min(pieces.axis.rank * pieces.length, pieces.whole)
    return x.narrow(0, start, min(pieces.length, pieces.whole - start))


def _in(how: Any, hidden: Tensor, weights: Tensor, around: Any) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and (hidden.requires_grad or weights.requires_grad):
        found: tuple[Tensor, Tensor] = how.apply(hidden, weights, around)
        return found
    plain: tuple[Tensor, Tensor] = how.taken(hidden, weights, around)
    return plain


def _padded(rows: Tensor, pieces: Pieces) -> Tensor:
    """As many rows as every rank has, where others can read them."""
    if len(rows) == pieces.length:
        return rows
    padded = pieces.axis.empty((pieces.length, *rows.shape[1:]), rows)
    padded[: len(rows)].copy_(rows)
    padded[len(rows) :].zero_()
    return padded


def _joined(rows: Tensor, pieces: Pieces) -> Tensor:
    if torch.is_grad_enabled() and rows.requires_grad:
        out: Tensor = _Join.apply(rows, pieces)  # type: ignore[no-untyped-call]
        return out
    return pieces.join(_padded(rows, pieces))


def _packed(index: Tensor, kept: Tensor | None) -> Tensor:
    return index if kept is None else torch.cat([index, kept.to(index.dtype)], 1)


def _unpacked(packed: Tensor, has_kept: bool) -> tuple[Tensor, Tensor | None]:
    if not has_kept:
        return packed, None
    index, kept = packed.chunk(2, 1)
    return index, kept.bool()


def _both(
    start: Callable[[Tensor], Arriving], ctx: Any, of_hidden: Tensor, of_weights: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """What an exchange makes of both gradients, as far as they are needed, which are on their way at once."""
    of_both = zip((of_hidden, of_weights), ctx.needs_input_grad, strict=False)
    hidden, weights = [start(grad) if needed else None for grad, needed in of_both]
    return None if hidden is None else hidden.wait(), None if weights is None else weights.wait()


class _Take(torch.autograd.Function):
    """This rank's rows of what all ranks have; backward: the gradients of all rows, both tensors' on their way at once."""

    @staticmethod
    def taken(hidden: Tensor, weights: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
        return own(hidden, pieces), own(weights, pieces)

    @staticmethod
    @override
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
        ctx.pieces = pieces
        return _Take.taken(hidden, weights, pieces)

    @staticmethod
    @of_tensor_axis
    @override
    def backward(ctx: Any, of_hidden: Tensor, of_weights: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        pieces: Pieces = ctx.pieces
        hidden, weights = _both(
            lambda grad: pieces.axis.start_gather(_padded(grad, pieces), 0), ctx, of_hidden, of_weights
        )
        return (
            hidden if hidden is None else hidden[: pieces.whole],
            weights if weights is None else weights[: pieces.whole],
            None,
        )


class _Join(torch.autograd.Function):
    """The rows of all ranks, of which each has computed its own; backward: this rank's rows of a gradient that all have."""

    @staticmethod
    @override
    def forward(ctx: Any, rows: Tensor, pieces: Pieces) -> Tensor:
        ctx.pieces = pieces
        joined = pieces.axis.gather(_padded(rows, pieces), 0)
        # Not a view: FSDP2, whose group the experts may be, would lose its hook if somebody added to it in place.
        return joined if len(joined) == pieces.whole else joined[: pieces.whole].clone()

    @staticmethod
    @of_tensor_axis
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return own(grad, ctx.pieces), None


class _Share(torch.autograd.Function):
    """The same tensors, for parts of experts; backward: the sums of the ranks' gradients."""

    @staticmethod
    def taken(hidden: Tensor, weights: Tensor, axis: TensorAxis) -> tuple[Tensor, Tensor]:
        return hidden, weights

    @staticmethod
    @override
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, axis: TensorAxis) -> tuple[Tensor, Tensor]:
        ctx.axis = axis
        return hidden.view_as(hidden), weights.view_as(weights)

    @staticmethod
    @of_tensor_axis
    @override
    def backward(ctx: Any, of_hidden: Tensor, of_weights: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        return *_both(ctx.axis.start_sum, ctx, of_hidden, of_weights), None


class _Gather(torch.autograd.Function):
    """The rows of all ranks, for parts of experts; backward: of the sums of the ranks' gradients those of this rank's rows."""

    @staticmethod
    def taken(hidden: Tensor, weights: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
        arriving = [pieces.axis.start_gather(x, 0) for x in (hidden, weights)]
        whole_hidden, whole_weights = (one.wait() for one in arriving)
        return whole_hidden, whole_weights

    @staticmethod
    @override
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
        ctx.pieces = pieces
        return _Gather.taken(hidden, weights, pieces)

    @staticmethod
    @of_tensor_axis
    @override
    def backward(ctx: Any, of_hidden: Tensor, of_weights: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        return *_both(ctx.pieces.start_scatter_sum, ctx, of_hidden, of_weights), None

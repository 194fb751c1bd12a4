"""Products of rows with the matrix of their expert.

Legend: S rows, M experts, I and O features in and out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_5d.model_flops import counted_as


def grouped_linear(rows_SI: Tensor, weights_MOI: Tensor, counts_M: Tensor) -> Tensor:
    """Each row times the transposed matrix of its expert, (S, O); rows are sorted by expert.

    Args:
        rows_SI: Rows.
        weights_MOI: A matrix for each expert, as `torch.nn.Linear` has them.
        counts_M: Rows of each expert, integers on the CPU, adding up to S; may be 0.

    Raises:
        ValueError: If there is not one number for each matrix, or they do not add up to the rows.
    """
    counts = tuple(counts_M.tolist())
    if len(counts) != len(weights_MOI) or sum(counts) != len(rows_SI):
        raise ValueError(
            f"{len(rows_SI)} rows and {len(weights_MOI)} matrices, but numbers of rows for {len(counts)} that add up to {sum(counts)}."
        )
    kind = rows_SI.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        rows_SI, weights_MOI = rows_SI.to(dtype), weights_MOI.to(dtype)
    with counted_as(2 * rows_SI.numel() * weights_MOI.shape[1], rows_SI.requires_grad + weights_MOI.requires_grad):
        out: Tensor = _Rows.apply(rows_SI, weights_MOI, counts, True)  # type: ignore[no-untyped-call]
    return out


class _Rows(torch.autograd.Function):
    """Rows times their matrix, transposed or not."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, counts: tuple[int, ...], transposed: bool) -> Tensor:
        ctx.save_for_backward(rows if matrices.requires_grad else None, matrices if rows.requires_grad else None)
        ctx.counts, ctx.transposed = counts, transposed
        out = rows.new_empty((len(rows), matrices.shape[1 if transposed else 2]))
        for expert, start, stop in _filled(counts):
            matrix = matrices[expert].t() if transposed else matrices[expert]
            torch.mm(rows[start:stop], matrix, out=out[start:stop])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, matrices = ctx.saved_tensors
        of_rows = of_matrices = None
        if ctx.needs_input_grad[0]:
            of_rows = _Rows.apply(grad, matrices, ctx.counts, not ctx.transposed)  # type: ignore[no-untyped-call]
        if ctx.needs_input_grad[1]:
            pair = (grad, rows) if ctx.transposed else (rows, grad)
            of_matrices = _Matrices.apply(*pair, ctx.counts)  # type: ignore[no-untyped-call]
        return of_rows, of_matrices, None, None


class _Matrices(torch.autograd.Function):
    """For each expert the sum of the outer products of two rows."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.counts = counts
        out = left.new_empty((len(counts), left.shape[1], right.shape[1]))
        for expert, start, stop in _filled(counts):
            torch.mm(left[start:stop].t(), right[start:stop], out=out[expert])
        for expert, count in enumerate(counts):
            if not count:
                out[expert].zero_()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, right = ctx.saved_tensors
        of_left = of_right = None
        if ctx.needs_input_grad[0]:
            of_left = _Rows.apply(right, grad, ctx.counts, True)  # type: ignore[no-untyped-call]
        if ctx.needs_input_grad[1]:
            of_right = _Rows.apply(left, grad, ctx.counts, False)  # type: ignore[no-untyped-call]
        return of_left, of_right, None


def _filled(counts: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Each expert that has rows, where they start and where they stop."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, start, start + count
            start += count

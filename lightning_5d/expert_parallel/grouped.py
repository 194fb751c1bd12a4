"""Products of rows with the matrix of their expert.

Legend: S rows, M experts, I and O features in and out.
"""

# [Note: one product or many]
# torch's own product of groups goes over the experts inside of one call, on a GPU in one kernel; it asks for 32 or 16 bits, and for rows of
# whole 16 bytes. Where it does not fit, a loop over the experts writes into the parts of one result: the same products, one call each.
# Recomputation knows torch's product, and may keep what it returns; the loop is not the same for all choices of experts, so it is run again.
# Either way they run inside of functions of our own, for autograd's formula of torch's product wants gradients that lie close together,
# gives gradients of matrices in another order than theirs, and knows nothing of schedules that leave these for later.

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_5d.hidden_operations import hidden_operations
from lightning_5d.model_flops import counted_as
from lightning_5d.pipeline_parallel.deferred_weights import DeferredWeights
from lightning_5d.pipeline_parallel.weight_products import Product

_NATIVE = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT = 16


def grouped_linear(rows_SI: Tensor, weights_MOI: Tensor, counts_M: Tensor) -> Tensor:
    """Each row times the transposed matrix of its expert, (S, O); rows are sorted by expert.

    Gradients of matrices without rows are zero. Where a schedule leaves the gradients of weights for later it does so with these, too, if they are
    those of a parameter itself.

    Args:
        rows_SI: Rows.
        weights_MOI: A matrix for each expert, as `torch.nn.Linear` has them. The transpose of one that lies the other way is not copied.
        counts_M: Rows of each expert, integers on the CPU, adding up to S; may be 0.

    Raises:
        ValueError: If there is not one number for each matrix, or they do not add up to the rows.
    """
    counts = Counts(counts_M)
    if len(counts.each) != len(weights_MOI) or counts.rows != len(rows_SI):
        raise ValueError(
            f"{len(rows_SI)} rows and {len(weights_MOI)} matrices, but {len(counts.each)} numbers of rows that add up to {counts.rows}."
        )
    kind = rows_SI.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        rows_SI, weights_MOI = rows_SI.to(dtype), weights_MOI.to(dtype)
    transposed = weights_MOI.stride(2) == 1
    matrices = weights_MOI if transposed else _untransposed(weights_MOI)
    operations = 2 * counts.rows * weights_MOI.shape[1] * weights_MOI.shape[2]
    with counted_as(operations, rows_SI.requires_grad + weights_MOI.requires_grad):
        out: Tensor = _Rows.apply(rows_SI, matrices, counts, transposed)  # type: ignore[no-untyped-call]
    return out


def _untransposed(weights: Tensor) -> Tensor:
    """The transpose of matrices; the parameter itself if they are its transpose."""
    base = weights._base
    if type(base) is nn.Parameter and base.requires_grad == weights.requires_grad:
        turned = base.transpose(1, 2) if base.ndim == 3 else base
        if (
            turned.shape == weights.shape
            and turned.stride() == weights.stride()
            and base.data_ptr() == weights.data_ptr()
        ):
            return base
    return weights.transpose(1, 2)


class Counts:
    """How many rows each expert has.

    Args:
        counts_M: The numbers.

    Attributes:
        each: The numbers.
        rows: Of all experts together.
        empty: The experts that have none.
    """

    def __init__(self, counts_M: Tensor) -> None:
        self.each: list[int] = counts_M.tolist()
        self.rows = sum(self.each)
        self.empty = [expert for expert, count in enumerate(self.each) if not count]
        self._ends: Tensor | None = None
        self._counts_M = counts_M

    def ends(self, device: torch.device) -> Tensor:
        """Where the rows of each expert end, as torch's product takes them."""
        if self._ends is None:
            self._ends = self._counts_M.cumsum(0).to(torch.int32).to(device, non_blocking=True)
        return self._ends


class GroupedProduct(Product):
    """`grouped_linear` for given numbers of rows.

    Args:
        counts: Rows of each expert.
        transposed: The weight is ``(M, O, I)``; else ``(M, I, O)``.
    """

    def __init__(self, counts: Counts, transposed: bool = True) -> None:
        self.counts, self.transposed = counts, transposed

    @override
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _rows(x, weight.transpose(1, 2) if self.transposed else weight, self.counts)

    @override
    def input_gradient(self, grad: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        return _rows(grad, weight if self.transposed else weight.transpose(1, 2), self.counts)

    @override
    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return _matrices(*self._factors(grad, x), self.counts)

    @override
    def bias_gradient(self, grad: Tensor) -> Tensor:
        raise NotImplementedError("Grouped products have no bias.")

    @override
    def add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor, weight: Tensor) -> None:
        if total.dtype != grad.dtype:
            super().add_weight_gradient(total, grad, x, weight)
            return
        left, right = (_each(factor, self.counts) for factor in self._factors(grad, x))
        for into, some, others in zip(total, left, right, strict=True):
            if len(some):
                into.addmm_(some.t(), others)

    def _factors(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return (grad, x) if self.transposed else (x, grad)


class _Rows(torch.autograd.Function):
    """Rows times their matrix, transposed or not."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, counts: Counts, transposed: bool) -> Tensor:
        ctx.save_for_backward(rows if matrices.requires_grad else None, matrices if rows.requires_grad else None)
        ctx.counts, ctx.transposed = counts, transposed
        ctx.weight = matrices if type(matrices) is nn.Parameter else None
        return _rows(rows, matrices.transpose(1, 2) if transposed else matrices, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, matrices = ctx.saved_tensors
        of_rows, of_matrices = ctx.needs_input_grad[:2]
        grad_rows = grad_matrices = None
        grad = grad.contiguous()
        if of_rows:
            grad_rows = _Rows.apply(grad, matrices, ctx.counts, not ctx.transposed)  # type: ignore[no-untyped-call]
        if of_matrices and ctx.weight is not None and not torch.is_grad_enabled():
            deferred = DeferredWeights.collecting_now()
            if deferred is not None:
                product = GroupedProduct(ctx.counts, ctx.transposed)
                of_matrices, _ = deferred.put_off(product, rows, grad, ctx.weight, None)
        if of_matrices:
            pair = (grad, rows) if ctx.transposed else (rows, grad)
            grad_matrices = _Matrices.apply(*pair, ctx.counts)  # type: ignore[no-untyped-call]
        return grad_rows, grad_matrices, None, None


class _Matrices(torch.autograd.Function):
    """For each expert the sum of the outer products of two rows."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, counts: Counts) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.counts = counts
        return _matrices(left, right, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, right = ctx.saved_tensors
        of_left = of_right = None
        if ctx.needs_input_grad[0]:
            of_left = _Rows.apply(right, grad.contiguous(), ctx.counts, True)  # type: ignore[no-untyped-call]
        if ctx.needs_input_grad[1]:
            of_right = _Rows.apply(left, grad.contiguous(), ctx.counts, False)  # type: ignore[no-untyped-call]
        return of_left, of_right, None


def _rows(rows: Tensor, matrices: Tensor, counts: Counts) -> Tensor:
    """Rows of one expert after the other times its matrix (in, out)."""
    rows = rows.contiguous()
    if _fits(rows, matrices) and (counts.rows or rows.device.type == "cpu"):
        return F.grouped_mm(rows, matrices, offs=counts.ends(rows.device))
    with hidden_operations():
        out = rows.new_empty((len(rows), matrices.shape[2]))
        for some, matrix, into in zip(_each(rows, counts), matrices, _each(out, counts), strict=True):
            if len(some):
                torch.mm(some, matrix, out=into)
    return out


def _matrices(left: Tensor, right: Tensor, counts: Counts) -> Tensor:
    """For each expert the transpose of its rows times others, (left, right)."""
    left, right = left.contiguous(), right.contiguous()
    if not counts.rows:
        return left.new_zeros((len(counts.each), left.shape[1], right.shape[1]))
    if _fits(left, right):
        out = F.grouped_mm(left.t(), right, offs=counts.ends(left.device))
    else:
        out = left.new_empty((len(counts.each), left.shape[1], right.shape[1]))
        for some, others, into in zip(_each(left, counts), _each(right, counts), out, strict=True):
            if len(some):
                torch.mm(some.t(), others, out=into)
    for expert in counts.empty:
        out[expert].zero_()
    return out


def _each(rows: Tensor, counts: Counts) -> tuple[Tensor, ...]:
    """The rows of each expert."""
    parts: tuple[Tensor, ...] = torch.split(rows, counts.each)
    return parts


def _fits(*operands: Tensor) -> bool:
    """Whether torch's product of groups takes these operands; checked with torch 2.13."""
    return all(
        x.dtype in _NATIVE
        and x.dtype == operands[0].dtype
        and x.data_ptr() % _ALIGNMENT == 0
        and all(stride == 1 or stride * x.itemsize % _ALIGNMENT == 0 for stride in x.stride())
        and 1 in x.stride()[-2:]
        for x in operands
    )

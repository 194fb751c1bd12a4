"""Cross-entropy of logits of which each rank holds some columns: one collective of three numbers per token and rank.

Each rank reduces its columns to their peak and the sum of exponentials relative to that peak (and with label smoothing the sum of
the logits), and adds the logit of the target if it has it. These numbers are gathered, and every rank makes the same loss of
them. Backward needs no communication: a rank's part of the gradient is its probabilities minus its part of the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_5d.shown.made_whole import tell
from lightning_5d.shown.targets import check_targets, refuse_strangers
from lightning_5d.tensor_parallel.vocabulary.normalization import combined, finite, wide
from lightning_5d.tensor_parallel.vocabulary.shard import VocabularyShard

# Legend of shapes: N tokens, n columns of this rank (h of them without padding), R ranks, V columns of all.

_BLOCK_BYTES = {"cpu": 2**20, "others": 2**28}


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` for whole logits and for those that ranks hold the columns of, with a z-loss.

    Computed in fp32 at least, whatever the dtype of the logits.

    Args:
        logits: Shape (V,), (N, V) or (N, V, d1, ...).
        target: Class indices of shape (), (N,) or (N, d1, ...), or probabilities of the shape of `logits`.
        weight: A factor for each class, shape (V,).
        ignore_index: Targets that have no part in loss and gradient.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.
        label_smoothing: From 0 to 1: how much of each target is spread evenly over all classes.
        z_loss: Factor of the square of the log of the sum of exponentials, added to each token's loss (Chowdhery et al.,
            PaLM, section 5); keeps logits from drifting away from zero.

    Returns:
        The loss, a plain tensor that is equal on all ranks: a scalar, or with ``"none"`` one of the shape of class indices. Its dtype is
        that of the logits, and fp32 under autocast.

    Raises:
        IndexError: If a target is not a class; on an accelerator that is an assertion on the device, as torch has it.
        ValueError: If sizes of logits and target do not match, or an option has no such value.
        RuntimeError: If their other dimensions, dtypes or `weight` do not match.
    """
    class_dim = 0 if logits.ndim == 1 else 1
    probabilities = logits.shape == target.shape
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if not 0.0 <= label_smoothing <= 1.0:
        raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
    if not isinstance(logits, VocabularyShard) or logits.vocabulary_dim != class_dim:
        if isinstance(logits, VocabularyShard):
            tell("cross_entropy over another dimension", logits)
            logits = logits.whole()
        if not z_loss:
            return F.cross_entropy(
                logits,
                target,
                weight=weight,
                ignore_index=ignore_index,
                reduction=reduction,
                label_smoothing=label_smoothing,
            )
        target = target.whole() if isinstance(target, VocabularyShard) else target
    dtype = torch.float32 if torch.is_autocast_enabled(logits.device.type) else logits.dtype
    if probabilities:
        loss_N = _of_probabilities(logits, target, weight, class_dim, label_smoothing)
        if z_loss:
            loss_N = loss_N + z_loss * logits.to(wide(logits.dtype)).logsumexp(class_dim).square()
        if reduction == "none":
            return loss_N.to(dtype)
        return (loss_N.sum() / (loss_N.numel() if reduction == "mean" else 1)).to(dtype)
    check_targets(logits, target, weight, class_dim)
    ignored = target == ignore_index
    safe = target.masked_fill(ignored, 0).long()
    refuse_strangers(safe, logits.shape[class_dim])
    if weight is not None:
        weight = weight.detach().to(wide(logits.dtype))
    weight_N = (torch.ones_like(safe, dtype=wide(logits.dtype)) if weight is None else weight[safe]).masked_fill(
        ignored, 0
    )
    if isinstance(logits, VocabularyShard):
        loss = _CrossEntropy.apply(logits, safe, ignored, weight, weight_N, label_smoothing, z_loss)  # type: ignore[no-untyped-call]
    else:
        loss = F.cross_entropy(
            logits,
            target,
            weight=weight if weight is None else weight.to(logits.dtype),
            ignore_index=ignore_index,
            reduction="none",
            label_smoothing=label_smoothing,
        )
        loss = loss + z_loss * logits.to(weight_N.dtype).logsumexp(class_dim).square().masked_fill(ignored, 0)
    if reduction == "none":
        return cast(Tensor, loss.to(dtype))
    return cast(Tensor, (loss.sum() / weight_N.sum() if reduction == "mean" else loss.sum()).to(dtype))


def _of_probabilities(
    logits: Tensor, target: Tensor, weight: Tensor | None, class_dim: int, label_smoothing: float
) -> Tensor:
    if not target.is_floating_point():
        raise RuntimeError(f"Expected floating point type for target with class probabilities, got {target.dtype}")
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / logits.shape[class_dim]
    if weight is not None:
        target = target * weight.view([-1 if d == class_dim else 1 for d in range(logits.ndim)])
    return -(logits.to(wide(logits.dtype)).log_softmax(class_dim) * target).sum(class_dim)


class _CrossEntropy(torch.autograd.Function):
    """The loss of each token, with nothing reduced; ignored ones have none.

    Backward forms exponentials again from the logits, which are there anyway, block of rows by block: keeping them would
    need one more tensor of the logits' size, in fp32, and a graph that is gone through twice would find it overwritten.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any,
        logits: VocabularyShard,
        target: Tensor,
        ignored: Tensor,
        weight_V: Tensor | None,
        weight_N: Tensor,
        label_smoothing: float,
        z_loss: float,
    ) -> Tensor:
        shape, held, axis = target.shape, logits.held, logits.axis
        rows_Nn = _rows(logits.local, logits.vocabulary_dim)
        ignored_N, weight_N = ignored.reshape(-1), weight_N.reshape(-1)
        place_N, absent_N = logits.owned(target.reshape(-1))
        weight_h = None if weight_V is None else logits.part(weight_V, 0)[:held]

        numbers = rows_Nn.new_zeros((4 if label_smoothing else 3, len(rows_Nn)), dtype=wide(logits.dtype))
        peak_N, sum_N, own_N = numbers[:3]
        peak_N.fill_(float("-inf"))
        own_N.copy_(rows_Nn.gather(1, place_N[:, None])[:, 0]).masked_fill_(absent_N, 0)
        for rows, block in _blocks(rows_Nn[:, :held], numbers.dtype):
            logits_bh = rows_Nn[rows, :held]
            peak_N[rows] = logits_bh.amax(1)
            torch.sub(logits_bh, finite(peak_N[rows])[:, None], out=block)
            if label_smoothing:
                numbers[3, rows] = (block if weight_h is None else block * weight_h).sum(1)
            sum_N[rows] = block.exp_().sum(1)

        numbers_RkN = axis.gather(numbers[None], 0)
        top_N, total_N = combined(numbers_RkN[:, 0], numbers_RkN[:, 1])
        log_N = total_N.log()
        loss_N = (1 - label_smoothing) * weight_N * (log_N - (numbers_RkN[:, 2].sum(0) - top_N))
        factor_N = (1 - label_smoothing) * weight_N  # of the probabilities in the gradient
        spread = label_smoothing / logits.vocabulary
        if label_smoothing:
            counts = [logits.held_by(rank) for rank in range(axis.size)]
            each = log_N.new_ones(logits.vocabulary) if weight_V is None else weight_V
            weight_R = torch.stack([part.sum() for part in torch.split(each, counts)])
            # Each rank's sum is relative to its own peak.
            smooth_N = (numbers_RkN[:, 3] + (finite(numbers_RkN[:, 0]) - top_N) * weight_R[:, None]).sum(0)
            loss_N = loss_N + spread * (weight_R.sum() * log_N - smooth_N)
            factor_N = factor_N + spread * weight_R.sum()
        if z_loss:
            loss_N = loss_N + z_loss * (log_N + top_N).square()
            factor_N = factor_N + 2 * z_loss * (log_N + top_N)

        taken_N = ((1 - label_smoothing) * weight_N).masked_fill(absent_N, 0)
        ctx.save_for_backward(logits.local, top_N, factor_N / total_N, taken_N, place_N, ignored_N, weight_h)
        ctx.like, ctx.dim, ctx.held, ctx.spread = logits.like, logits.vocabulary_dim, held, spread
        return loss_N.masked_fill(ignored_N, 0).view(shape)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[VocabularyShard | None, ...]:
        local, top_N, factor_N, taken_N, place_N, ignored_N, weight_h = ctx.saved_tensors
        held, spread = ctx.held, ctx.spread
        grad_N = grad.reshape(-1).masked_fill(ignored_N, 0)
        factor_N, taken_N, spread_N = grad_N * factor_N, -grad_N * taken_N, grad_N * spread
        rows_Nn = _rows(local, ctx.dim)
        result_Nn = torch.empty_like(rows_Nn, memory_format=torch.contiguous_format)
        in_place = result_Nn.dtype == factor_N.dtype
        for rows, block in _blocks(result_Nn[:, :held], factor_N.dtype, in_place=in_place):
            torch.sub(rows_Nn[rows, :held], top_N[rows, None], out=block).exp_().mul_(factor_N[rows, None])
            if spread:
                block.sub_(spread_N[rows, None] if weight_h is None else spread_N[rows, None] * weight_h)
            block.scatter_add_(1, place_N[rows, None], taken_N[rows, None])
            if not in_place:
                result_Nn[rows, :held] = block
        ends = [size for d, size in enumerate(local.shape) if d != ctx.dim]
        result = result_Nn.view(*ends, local.shape[ctx.dim]).movedim(-1, ctx.dim)
        return ctx.like(result), None, None, None, None, None, None


def _rows(local: Tensor, dim: int) -> Tensor:
    """Logits as a matrix with a row for each token."""
    return local.movedim(dim, -1).reshape(-1, local.shape[dim])


def _blocks(rows_Nh: Tensor, dtype: torch.dtype, *, in_place: bool = False) -> Iterator[tuple[slice, Tensor]]:
    """Rows in blocks that stay in a cache while one operation after the other goes over them, and memory for each block.

    Args:
        rows_Nh: The rows.
        dtype: Of the memory.
        in_place: The memory of a block is its rows themselves.
    """
    count, width = rows_Nh.shape
    if not width:
        return
    at_once = max(1, _BLOCK_BYTES.get(rows_Nh.device.type, _BLOCK_BYTES["others"]) // (width * dtype.itemsize))
    memory = rows_Nh if in_place else rows_Nh.new_empty((min(at_once, count), width), dtype=dtype)
    for first in range(0, count, at_once):
        rows = slice(first, min(first + at_once, count))
        yield rows, memory[rows] if in_place else memory[: rows.stop - first]

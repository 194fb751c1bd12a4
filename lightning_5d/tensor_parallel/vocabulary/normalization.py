"""Softmax and its relatives: each rank reduces its columns to a peak and a sum of exponentials per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_5d.tensor_parallel.vocabulary.registry import handles
from lightning_5d.tensor_parallel.vocabulary.shard import VocabularyShard

aten = torch.ops.aten

# Legend of shapes: N tokens, n columns of this rank, R ranks, V columns of all.


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which probabilities of logits are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def finite(peak: Tensor) -> Tensor:
    """What exponents are relative to: the peak, or 0 where all of a rank's logits are -inf."""
    return peak.masked_fill(peak == float("-inf"), 0)


def combined(peaks_RN: Tensor, sums_RN: Tensor) -> tuple[Tensor, Tensor]:
    """The peak of all ranks, and the sum of exponentials relative to it, in the same bits on all ranks.

    Args:
        peaks_RN: Each rank's largest logit.
        sums_RN: Each rank's sum of exponentials of logits minus that.
    """
    peak_N = peaks_RN.amax(0)
    return peak_N, (sums_RN * (peaks_RN - peak_N).exp_()).sum(0)


def _exponentials(shard: VocabularyShard) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Exponentials of all local columns relative to the rank's peak, that peak, and peak and sum over all ranks.

    They have the dimension of the vocabulary, with size 1.
    """
    dim = shard.vocabulary_dim
    logits = shard.columns.to(wide(shard.dtype))
    peak = (
        logits.amax(dim, keepdim=True)
        if shard.held
        else shard.local.narrow(dim, 0, 1).to(logits.dtype).fill_(-torch.inf)
    )
    exponentials = (logits - finite(peak)).exp_()
    peaks, sums = shard.axis.gather(torch.stack([peak, exponentials.sum(dim, keepdim=True)])[None], 0).unbind(1)
    return exponentials, peak, *combined(peaks, sums)


def _padded(shard: VocabularyShard, columns: Tensor, dtype: torch.dtype) -> VocabularyShard:
    missing = shard.width - shard.held
    if missing:
        shape = [missing if d == shard.vocabulary_dim else size for d, size in enumerate(columns.shape)]
        columns = torch.cat([columns, columns.new_zeros(shape)], shard.vocabulary_dim)
    return shard.like(columns.to(dtype))


def _result_dtype(shard: VocabularyShard, half_to_float: bool) -> torch.dtype:
    return torch.float32 if half_to_float else shard.dtype


@handles(aten._softmax.default)
def _softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard, dim, half_to_float = args
    if dim % shard.ndim != shard.vocabulary_dim:
        return shard.like(func(shard.local, dim, half_to_float))
    exponentials, peak, top, total = _exponentials(shard)
    return _padded(shard, exponentials.mul_((finite(peak) - top).exp_() / total), _result_dtype(shard, half_to_float))


@handles(aten._log_softmax.default)
def _log_softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard, dim, half_to_float = args
    if dim % shard.ndim != shard.vocabulary_dim:
        return shard.like(func(shard.local, dim, half_to_float))
    _, _, top, total = _exponentials(shard)
    return shard.like((shard.local - top).sub_(total.log()).to(_result_dtype(shard, half_to_float)))


@handles(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, output, dim, dtype = args
    if not isinstance(output, VocabularyShard) or (
        isinstance(grad, VocabularyShard) and grad.vocabulary_dim != output.vocabulary_dim
    ):
        return NotImplemented
    incoming = grad.local if isinstance(grad, VocabularyShard) else output.part(grad, output.vocabulary_dim)
    if dim % output.ndim != output.vocabulary_dim:
        return output.like(func(incoming, output.local, dim, dtype))
    incoming, result = output.like(incoming.to(wide(output.dtype))), output.local.to(wide(output.dtype))
    if func is aten._softmax_backward_data.default:
        inner = output.axis.sum((incoming.columns * output.columns).sum(output.vocabulary_dim, keepdim=True))
        return output.like((incoming.local - inner).mul_(result).to(dtype))
    inner = output.axis.sum(incoming.columns.sum(output.vocabulary_dim, keepdim=True))
    return output.like((incoming.local - result.exp() * inner).to(dtype))


@handles(aten.logsumexp.default)
def _logsumexp(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard, dims = args[:2]
    keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    dims = [d % shard.ndim for d in dims]
    if shard.vocabulary_dim not in dims:
        return shard.like(
            func(shard.local, dims, keepdim),
            shard.vocabulary_dim - (0 if keepdim else sum(d < shard.vocabulary_dim for d in dims)),
        )
    if dims != [shard.vocabulary_dim]:
        return NotImplemented
    _, _, top, total = _exponentials(shard)
    result = torch.where(top.isinf(), top, top + total.log()).to(shard.dtype)
    return result if keepdim else result.squeeze(shard.vocabulary_dim)

"""Losses of logits that people call by name."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_5d.shown.losses import reduction_of
from lightning_5d.tensor_parallel.vocabulary.choices import pick
from lightning_5d.tensor_parallel.vocabulary.cross_entropy import cross_entropy
from lightning_5d.tensor_parallel.vocabulary.registry import answers
from lightning_5d.tensor_parallel.vocabulary.shard import VocabularyShard


@answers(F.cross_entropy)
def _cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(
        input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None, ignore_index: int = -100,
        reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
    ) -> Any:  # fmt: skip
        if not isinstance(input, VocabularyShard):
            return NotImplemented
        return cross_entropy(
            input,
            target,
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction_of(size_average, reduce, reduction),
            label_smoothing=label_smoothing,
        )

    return call(*args, **kwargs)


@answers(F.nll_loss)
def _nll_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(
        input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None, ignore_index: int = -100,
        reduce: bool | None = None, reduction: str = "mean",
    ) -> Any:  # fmt: skip
        class_dim = 0 if input.ndim == 1 else 1
        sizes = [size for d, size in enumerate(input.shape) if d != class_dim]
        if not isinstance(input, VocabularyShard) or input.vocabulary_dim != class_dim or list(target.shape) != sizes:
            return NotImplemented
        how = reduction_of(size_average, reduce, reduction)
        ignored = target == ignore_index
        safe = target.masked_fill(ignored, 0)
        picked = pick(input, safe.unsqueeze(class_dim)).squeeze(class_dim)
        factor = (torch.ones_like(picked) if weight is None else weight.to(picked.dtype)[safe]).masked_fill(ignored, 0)
        loss = -(picked * factor).masked_fill(ignored, 0)
        return loss if how == "none" else loss.sum() / (factor.sum() if how == "mean" else 1)

    return call(*args, **kwargs)

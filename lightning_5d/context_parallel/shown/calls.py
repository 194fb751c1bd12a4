"""Losses of logits that people call by name."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_5d.context_parallel.shown.cross_entropy import token_loss
from lightning_5d.context_parallel.shown.registry import answers
from lightning_5d.shown.losses import reduction_of


@answers(F.cross_entropy)
def _cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(
        input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None, ignore_index: int = -100,
        reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
    ) -> Any:  # fmt: skip
        how = reduction_of(size_average, reduce, reduction)
        return token_loss(func, input, target, weight, ignore_index, how, label_smoothing=label_smoothing)

    return call(*args, **kwargs)


@answers(F.nll_loss)
def _nll_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(
        input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None, ignore_index: int = -100,
        reduce: bool | None = None, reduction: str = "mean",
    ) -> Any:  # fmt: skip
        return token_loss(func, input, target, weight, ignore_index, reduction_of(size_average, reduce, reduction))

    return call(*args, **kwargs)

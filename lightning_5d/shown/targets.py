"""What losses say of targets that do not fit."""

from __future__ import annotations

import torch
from torch import Tensor


def check_targets(logits: Tensor, target: Tensor, weight: Tensor | None, class_dim: int) -> None:
    """Raises what `F.cross_entropy` does for sizes and dtypes that do not match."""
    if logits.ndim > 1 and (target.ndim == 0 or logits.shape[0] != target.shape[0]):
        batch = target.shape[0] if target.ndim else 0
        raise ValueError(f"Expected input batch_size ({logits.shape[0]}) to match target batch_size ({batch}).")
    expected = [size for d, size in enumerate(logits.shape) if d != class_dim]
    if list(target.shape) != expected:
        raise RuntimeError(f"Expected target size {expected}, got {list(target.shape)}")
    if target.dtype not in (torch.int64, torch.uint8):
        raise RuntimeError(f"expected target with class indices of dtype int64 (Long), got {target.dtype}")
    if weight is not None and list(weight.shape) != [logits.shape[class_dim]]:
        raise RuntimeError(
            "weight tensor should be defined either for all or no classes: there are"
            f" {logits.shape[class_dim]}, the shape of weight is {list(weight.shape)}"
        )


def refuse_strangers(target: Tensor, classes: int) -> None:
    """Raises an `IndexError` for a target that is no class; on an accelerator that is an assertion on the device, as torch has it."""
    strangers = (target < 0) | (target >= classes)
    if target.device.type != "cpu":
        torch._assert_async(~strangers.any(), "Target is out of bounds.")  # private; checked with torch 2.13
    elif strangers.any():
        raise IndexError(f"Target {int(target[strangers][0])} is out of bounds.")

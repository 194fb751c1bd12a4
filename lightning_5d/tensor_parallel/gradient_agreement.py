"""Whether ranks of the tensor axis have the same gradients where they hold the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_5d.tensor_parallel.axis import TensorAxis


@dataclass(frozen=True)
class Agreement:
    """What a comparison has found, the same on all ranks.

    Attributes:
        seen: There was a gradient on some rank.
        differing: Names of weights whose gradients differ, with the largest difference of their sums relative to their size.
    """

    seen: bool
    differing: dict[str, float]


def compare(
    gradients: Mapping[str, Tensor | None], axis: TensorAxis, device: torch.device, tolerance: float
) -> Agreement:
    """Compares sums of gradients over the ranks of the axis, in one small collective.

    Args:
        gradients: By name; the same names on all ranks. Of a sharded one this rank's shard counts.
        axis: The ranks.
        device: Where a collective's tensor may live.
        tolerance: The largest difference, relative to the sum of absolute values. NaN and infinity are not compared.
    """
    rows = torch.zeros(len(gradients), 6, device=device)
    for row, gradient in zip(rows, gradients.values(), strict=True):
        if gradient is None:
            continue
        local = (gradient.to_local() if isinstance(gradient, DTensor) else gradient).detach().float()
        total, size = local.sum(), local.abs().sum()
        row[:] = torch.stack([total, -total, size, -size, size.isfinite().logical_not().float(), torch.ones_like(size)])
    rows = axis.sum(rows, "max").cpu() if len(rows) else rows.cpu()
    spread = torch.maximum(rows[:, 0] + rows[:, 1], rows[:, 2] + rows[:, 3])
    relative = torch.where(rows[:, 4] > 0, 0.0, spread / rows[:, 2].clamp(min=1e-30))
    found = {name: float(by) for name, by in zip(gradients, relative, strict=True) if float(by) > tolerance}
    return Agreement(bool((rows[:, 5] > 0).any()), found)

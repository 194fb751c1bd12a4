"""What a run's gradient norms have been lately, and what follows from it: thresholds and spikes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


class NormHistory:
    """The gradient norms of the last steps of one optimizer, and counts of what was done with them.

    Only norms of steps that were taken are kept: finite, no spikes, before clipping.

    Args:
        window: How many norms are kept.

    Attributes:
        steps: Steps taken.
        clipped: How many of them were clipped; a tensor on the device, so that nothing waits for it.
        skipped_nonfinite: Steps left out because the norm was not finite.
        skipped_spikes: Steps left out because the norm was far above the others.
        nonfinite_in_a_row: Of the former, those since the last step that was taken.
        spikes_in_a_row: The norms of the spikes since the last step that was taken.
    """

    def __init__(self, window: int) -> None:
        self.norms: deque[float] = deque(maxlen=window)
        self.steps = 0
        self.clipped: int | Tensor = 0
        self.skipped_nonfinite = 0
        self.skipped_spikes = 0
        self.nonfinite_in_a_row = 0
        self.spikes_in_a_row: list[float] = []

    def quantile(self, share: float) -> float:
        """The norm below which `share` of the kept ones lie, linear between neighbours."""
        return float(torch.tensor(list(self.norms), dtype=torch.float64).quantile(share))

    def deviations(self, norm: float) -> float:
        """How many standard deviations of the kept norms `norm` lies above their mean.

        The deviation is taken to be at least a hundredth of the mean, so that norms that hardly differ do not make a spike
        of every small change.
        """
        mean = math.fsum(self.norms) / len(self.norms)
        variance = math.fsum((kept - mean) ** 2 for kept in self.norms) / len(self.norms)
        deviation = max(math.sqrt(variance), 0.01 * mean)
        return (norm - mean) / deviation if deviation > 0 else math.copysign(math.inf, norm) if norm else 0.0

    def restart(self, norms: Iterable[float]) -> None:
        """Forgets the kept norms in favour of these."""
        self.norms.clear()
        self.norms.extend(norms)

    def take(self, norm: float | None) -> None:
        """Counts a step that is taken, with its norm where it is known on the host."""
        self.steps += 1
        self.nonfinite_in_a_row = 0
        self.spikes_in_a_row = []
        if norm is not None and math.isfinite(norm):
            self.norms.append(norm)

    def state_dict(self) -> dict[str, Any]:
        """Everything, in plain numbers."""
        return {
            "norms": list(self.norms),
            "steps": self.steps,
            "clipped": int(self.clipped),
            "skipped_nonfinite": self.skipped_nonfinite,
            "skipped_spikes": self.skipped_spikes,
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
            "spikes_in_a_row": list(self.spikes_in_a_row),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`; a shorter window keeps the latest norms."""
        self.restart(state["norms"])
        self.steps = state["steps"]
        self.clipped = state["clipped"]
        self.skipped_nonfinite = state["skipped_nonfinite"]
        self.skipped_spikes = state["skipped_spikes"]
        self.nonfinite_in_a_row = state["nonfinite_in_a_row"]
        self.spikes_in_a_row = list(state["spikes_in_a_row"])

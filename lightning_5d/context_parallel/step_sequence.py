"""The sequence that a step is about: its length, and how it is cut."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_5d.context_parallel.cut import SequenceCut
from lightning_5d.tensor_parallel.axis import TensorAxis


@dataclass(frozen=True, eq=False)
class StepSequence:
    """What is known about the sequences inside of a door, where each rank holds a part of them.

    Attributes:
        cut: Which tokens each rank holds.
        axis: The collectives over the ranks of ``cp``.
    """

    cut: SequenceCut
    axis: TensorAxis

    @property
    def rank(self) -> int:
        """This rank's place on the axis."""
        return self.axis.rank

    def part(self, whole: Tensor, dim: int, fill: float | bool = 0) -> Tensor:
        """What this rank holds of a whole tensor."""
        return self.cut.part(whole, dim, self.axis.rank, fill)

    def gather(self, local: Tensor, dim: int) -> Tensor:
        """The whole tensor of the ranks' parts, without a graph. All ranks call it."""
        return self.cut.join(self.axis.gather(local, dim).chunk(self.cut.size, dim), dim)

    def positions(self, device: torch.device) -> Tensor:
        """The positions of this rank's tokens, (1, s); those of padding go on."""
        return self.cut.positions(self.axis.rank, device)[None]

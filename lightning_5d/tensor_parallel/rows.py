"""Which part of a weight each rank of the tensor axis stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """How a whole weight, as a checkpoint has it, is spread over the ranks along one dimension.

    Every rank stores the same number of rows. What all ranks store, one after the other, is the *stored* weight. It may
    have the rows of the whole one in another order (fused projections, each of whose parts is cut), several times (key and
    value heads that several ranks need), or between rows of zeros (a vocabulary that the ranks do not divide).

    Attributes:
        dim: The dimension that is cut; "rows" are slices along it.
        whole: Rows of the whole weight.
        index: For each row of the stored weight its row of the whole one, -1 for padding; ``None`` where the two are the same.
        copies: So many neighbouring ranks store the same rows, and the sum of their gradients is the gradient.
    """

    dim: int
    whole: int
    index: tuple[int, ...] | None = None
    copies: int = 1

    @property
    def stored(self) -> int:
        """Rows of the stored weight, over all ranks."""
        return self.whole if self.index is None else len(self.index)

    def whole_shape(self, stored: Sequence[int]) -> torch.Size:
        """The shape of the whole weight, from that of the stored one."""
        return torch.Size(self.whole if dim == self.dim else size for dim, size in enumerate(stored))

    def store(self, whole: Tensor) -> Tensor:
        """The stored weight, over all ranks, of a whole one; padding is zero."""
        if self.index is None:
            return whole
        index = torch.tensor(self.index, device=whole.device)
        rows = whole.index_select(self.dim, index.clamp(min=0))
        absent = (index < 0).view([-1 if d == self.dim else 1 for d in range(whole.ndim)])
        return rows.masked_fill(absent, 0) if bool(absent.any()) else rows

    def restore(self, stored: Tensor) -> Tensor:
        """The whole weight of a stored one; of rows that are stored several times the first."""
        if self.index is None:
            return stored
        first: dict[int, int] = {}
        for place, row in enumerate(self.index):
            first.setdefault(row, place)
        return stored.index_select(
            self.dim, torch.tensor([first[row] for row in range(self.whole)], device=stored.device)
        )

    def part(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """What one of `size` ranks stores of a whole weight."""
        return self.store(whole).chunk(size, self.dim)[rank]


def even(dim: int, whole: int) -> Rows:
    """Rows in their own order, each once."""
    return Rows(dim, whole)

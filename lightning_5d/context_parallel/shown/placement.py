"""How a tensor's tokens lie in its dimensions, and which of them this rank holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_5d.context_parallel.shown.tokens import Tokens, same, window
from lightning_5d.context_parallel.step_sequence import StepSequence
from lightning_5d.shown.tensor import gathered_over


class Placement(NamedTuple):
    """Where a tensor has its tokens: along one dimension of ``lead * T * trail`` entries.

    Attributes:
        sequence: The sequence, and the ranks that hold it.
        tokens: The T tokens.
        dim: The dimension.
        lead: Entries of dimensions before the tokens that a view has merged with them: the rows of a batch.
        trail: The same of dimensions behind.
    """

    sequence: StepSequence
    tokens: Tokens
    dim: int
    lead: int = 1
    trail: int = 1

    @classmethod
    def of(cls, sequence: StepSequence, dim: int) -> Placement:
        """That of a tensor that has the whole sequence along `dim`."""
        return cls(sequence, window(sequence.cut), dim)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.sequence.axis.rank

    @property
    def merged(self) -> bool:
        """Whether the dimension has more than tokens."""
        return self.lead * self.trail != 1

    @property
    def size(self) -> int:
        """Entries of the dimension."""
        return self.lead * self.tokens.size * self.trail

    @property
    def held(self) -> int:
        """Entries of the dimension that this rank holds."""
        return self.lead * self.tokens.counts[self.rank] * self.trail

    def at(self, dim: int) -> Placement:
        """The same in another dimension."""
        return self if dim == self.dim else self._replace(dim=dim)

    def matches(self, other: Placement) -> bool:
        """Whether this rank holds the same entries, wherever the dimension is."""
        return self.lead == other.lead and self.trail == other.trail and same(self.tokens, other.tokens)

    def part(self, whole: Tensor, dim: int | None = None) -> Tensor:
        """What this rank holds of a whole tensor, with as many entries along `dim`."""
        dim = self.dim if dim is None else dim
        if whole.stride(dim) == 0:  # an expanded number, as gradients of sums are
            return whole.narrow(dim, 0, self.held)
        if not self.merged:
            return self.tokens.part(whole, dim, self.rank)
        before, after = whole.shape[:dim], whole.shape[dim + 1 :]
        apart = whole.reshape(*before, self.lead, self.tokens.size, self.trail, *after)
        return self.tokens.part(apart, dim + 1, self.rank).reshape(*before, self.held, *after)

    def gather(self, local: Tensor) -> Tensor:
        """The whole tensor, without a graph. All ranks call it."""
        before, after = local.shape[: self.dim], local.shape[self.dim + 1 :]
        counts, here = self.tokens.counts, self.tokens.counts[self.rank]
        if not self.tokens.size:
            return local.new_empty((*before, 0, *after))
        dim = self.dim
        if self.merged:
            local, dim = local.reshape(*before, self.lead, here, self.trail, *after), dim + 1
        if here < max(counts):
            local = padded(local, dim, max(counts))
        whole = self.tokens.join(gathered_over(self.sequence.axis, local, dim), dim)
        return whole.reshape(*before, self.size, *after) if self.merged else whole

    def after_view(self, before: Sequence[int], after: Sequence[int]) -> Placement | None:
        """Where the tokens are when a view has changed a tensor's shape; ``None`` if they are in several dimensions."""
        front = math.prod(before[: self.dim]) * self.lead
        back = math.prod(before[self.dim + 1 :]) * self.trail
        found = None
        ahead, behind = 1, math.prod(after)
        for place, size in enumerate(after):
            if not size:
                return None
            behind //= size
            if not front % ahead and not back % behind:
                lead, trail = front // ahead, back // behind
                # A single token fits everywhere; it should be alone in its dimension.
                better = found is None or lead * trail < found.lead * found.trail
                if size == lead * self.tokens.size * trail and better:
                    found = self._replace(dim=place, lead=lead, trail=trail)
            ahead *= size
        return found


def padded(local: Tensor, dim: int, size: int) -> Tensor:
    """With zeros at the end of a dimension."""
    shape = [size - local.shape[dim] if d == dim else n for d, n in enumerate(local.shape)]
    return torch.cat([local, local.new_zeros(shape)], dim)

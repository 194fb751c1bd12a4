"""Which tokens of a shown tensor each rank holds: a window of the sequence, or those that a mask has chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from typing_extensions import override

from lightning_5d.context_parallel.cut import SequenceCut


class Tokens(ABC):
    """Tokens in an order, each held by one rank; a rank holds its own in the same order. There is no padding among them."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Tokens of all ranks, T."""

    @property
    @abstractmethod
    def counts(self) -> tuple[int, ...]:
        """Tokens of each rank."""

    @abstractmethod
    def owner(self, device: torch.device) -> Tensor:
        """The rank of each token, (T,)."""

    @abstractmethod
    def place(self, device: torch.device) -> Tensor:
        """Where each token is among those of its rank, (T,)."""

    @abstractmethod
    def part(self, whole: Tensor, dim: int, rank: int) -> Tensor:
        """What a rank holds of a tensor with T entries along `dim`."""

    def join(self, parts: Tensor, dim: int) -> Tensor:
        """The whole tensor of the parts of all ranks one after the other along `dim`, each padded to the largest of them."""
        device = parts.device
        return parts.index_select(dim, self.owner(device) * max(self.counts) + self.place(device))


@dataclass(frozen=True)
class Window(Tokens):
    """The positions from `start` to `stop` of a sequence. Made by `window`."""

    cut: SequenceCut
    start: int
    stop: int

    @property
    @override
    def size(self) -> int:
        return self.stop - self.start

    @cached_property
    def spans(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each rank what it holds of the window (from, to), relative to its start."""
        clipped = [
            [
                (max(first, self.start) - self.start, min(last, self.stop) - self.start)
                for first, last in self.cut.spans(rank)
            ]
            for rank in range(self.cut.size)
        ]
        return tuple(tuple((first, last) for first, last in one if first < last) for one in clipped)

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        return tuple(sum(last - first for first, last in one) for one in self.spans)

    @property
    @override
    def counts(self) -> tuple[int, ...]:
        return self._counts

    @override
    def owner(self, device: torch.device) -> Tensor:
        return _tables(self, device)[0]

    @override
    def place(self, device: torch.device) -> Tensor:
        return _tables(self, device)[1]

    @override
    def part(self, whole: Tensor, dim: int, rank: int) -> Tensor:
        pieces = [whole.narrow(dim, first, last - first) for first, last in self.spans[rank]]
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces, dim) if pieces else whole.narrow(dim, 0, 0)

    def before(self, position: int, rank: int) -> int:
        """Tokens that a rank holds before a position that is relative to the start."""
        return sum(min(last, position) - first for first, last in self.spans[rank] if first < position)

    def within(self, start: int, stop: int) -> Window:
        """The window from `start` to `stop`, relative to this one's start."""
        return window(self.cut, self.start + start, self.start + stop)


@lru_cache(maxsize=1024)
def window(cut: SequenceCut, start: int = 0, stop: int | None = None) -> Window:
    """The positions from `start` to `stop` of a sequence, all of them by default."""
    return Window(cut, start, cut.length if stop is None else stop)


@lru_cache(maxsize=64)
def _tables(tokens: Window, device: torch.device) -> tuple[Tensor, Tensor]:
    owner, place = (torch.empty(tokens.size, dtype=torch.int64) for _ in range(2))
    for rank, spans in enumerate(tokens.spans):
        before = 0
        for first, last in spans:
            owner[first:last] = rank
            place[first:last] = torch.arange(before, before + last - first)
            before += last - first
    return owner.to(device), place.to(device)


class Selection(Tokens):
    """Any tokens in any order.

    Args:
        owner: The rank of each, (T,), the same on all ranks.
        ranks: How many ranks there are.
    """

    def __init__(self, owner: Tensor, ranks: int) -> None:
        self._owner, self._ranks = owner, ranks

    @property
    @override
    def size(self) -> int:
        return self._owner.shape[0]

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        return tuple(torch.bincount(self._owner, minlength=self._ranks).tolist())

    @property
    @override
    def counts(self) -> tuple[int, ...]:
        return self._counts

    @override
    def owner(self, device: torch.device) -> Tensor:
        return self._owner.to(device)

    @override
    def place(self, device: torch.device) -> Tensor:
        return self._place.to(device)

    @cached_property
    def _place(self) -> Tensor:
        seen = (self._owner[:, None] == torch.arange(self._ranks, device=self._owner.device)).cumsum(0)
        return seen.gather(1, self._owner[:, None])[:, 0] - 1

    @override
    def part(self, whole: Tensor, dim: int, rank: int) -> Tensor:
        return whole.index_select(dim, (self._owner == rank).nonzero()[:, 0].to(whole.device))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Selection):
            return False
        return self is other or bool(torch.equal(self._owner, other._owner))

    def __hash__(self) -> int:
        return id(self)


def same(one: Tokens, other: Tokens) -> bool:
    """Whether each rank holds the same entries of both."""
    return one is other or one == other

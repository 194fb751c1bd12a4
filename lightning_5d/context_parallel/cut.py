"""Which tokens of a sequence each rank of the context axis holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Balance = Literal["zigzag", "contiguous"]


@dataclass(frozen=True)
class SequenceCut:
    """A sequence of `length` tokens over `size` ranks, padded at its end so that all hold equally many.

    The ranks form ``size / ulysses`` places of a ring with `ulysses` neighbours in each. A place holds one or two spans: the r-th of
    as many equal ones (``"contiguous"``), or chunks r and 2n-1-r of 2n (``"zigzag"``), so that causal attention is equal work. Its
    neighbours hold equal pieces of them, one after the other: what they hold together, in the order of their ranks, is the place's share in
    the order of positions.

    Attributes:
        length: Tokens of the sequence, S.
        size: Ranks of the axis, c.
        balance: How the places of the ring share the sequence.
        ulysses: Ranks per place, u; divides c.
        pieces: Into how many equal pieces what a rank holds of each span can be cut further; padding sees to it.

    Source: Brandon et al., "Striped Attention" (2023), and the zigzag order of Llama 3 (2024), section 3.3.2, for the balance.
    """

    length: int
    size: int
    balance: Balance = "zigzag"
    ulysses: int = 1
    pieces: int = 1

    @property
    def of_places(self) -> SequenceCut:
        """The same spans, cut over the places of the ring."""
        return SequenceCut(self.length, self.places, self.balance, 1, self.ulysses * self.pieces)

    @property
    def places(self) -> int:
        """Places of the ring."""
        return self.size // self.ulysses

    @property
    def spans_per_place(self) -> int:
        """Spans that a place of the ring holds: 2 in zigzag order, if there is more than one place."""
        return 2 if self.balance == "zigzag" and self.places > 1 else 1

    @property
    def multiple(self) -> int:
        """What the padded length is a multiple of."""
        return self.size * self.spans_per_place * self.pieces

    @property
    def padded(self) -> int:
        """Tokens with padding."""
        return -(-self.length // self.multiple) * self.multiple

    @property
    def local(self) -> int:
        """Tokens that each rank holds, s, padding included."""
        return self.padded // self.size

    def place_spans(self, place: int) -> tuple[tuple[int, int], ...]:
        """The spans of positions (start, stop) that a place of the ring holds, in the order in which it holds them."""
        chunks = self.places * self.spans_per_place
        width = self.padded // chunks
        held = (place,) if self.spans_per_place == 1 else (place, chunks - 1 - place)
        return tuple((chunk * width, (chunk + 1) * width) for chunk in held)

    def spans(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The spans of positions (start, stop) that a rank holds, in the order in which it holds them; past `length` is padding."""
        start = rank % self.ulysses * self.local
        stop = start + self.local
        found, before = [], 0
        for first, last in self.place_spans(rank // self.ulysses):
            low, high = max(start - before, 0), min(stop - before, last - first)
            if low < high:
                found.append((first + low, first + high))
            before += last - first
        return tuple(found)

    def positions(self, rank: int, device: torch.device | None = None) -> Tensor:
        """The positions that a rank holds, (s,), int64."""
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in self.spans(rank)])

    def held(self, rank: int) -> int:
        """Tokens that a rank holds, without padding."""
        return sum(max(0, min(stop, self.length) - start) for start, stop in self.spans(rank))

    def part(self, whole: Tensor, dim: int, rank: int, fill: float | bool = 0) -> Tensor:
        """What a rank holds of a whole tensor, with `length` entries along `dim`; padding is `fill`."""
        pieces = []
        for start, stop in self.spans(rank):
            here = max(0, min(stop, self.length) - start)
            pieces.append(whole.narrow(dim, min(start, self.length), here))
            if here < stop - start:
                shape = list(whole.shape)
                shape[dim] = stop - start - here
                pieces.append(whole.new_full(shape, fill))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The whole tensor of what all ranks hold, in the order of ranks; padding is dropped."""
        return torch.cat(list(parts), dim).index_select(dim, self._order.to(parts[0].device))

    @cached_property
    def _order(self) -> Tensor:
        """Where position p is in the parts of all ranks one after the other, (S,)."""
        return torch.cat([self.positions(rank) for rank in range(self.size)]).argsort()[: self.length]

"""Between ranks that hold all heads of some tokens and ranks that hold some heads of all tokens.

Messages have the tokens outermost, as attention's projections make them and as they are put together again: what a rank
takes from another is one piece of memory for each span of positions. Shapes: B batch, H heads, D size of a head, s tokens of a rank, S
tokens of all ranks, c ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_5d.context_parallel.attention import accumulator
from lightning_5d.context_parallel.heads import Heads
from lightning_5d.data_parallel.traffic import Traffic
from lightning_5d.data_parallel.transport import Transport

Spans = Sequence[tuple[tuple[int, int], ...]]
"""For each rank the spans (start, stop) of the whole that its tokens are, in the order in which it holds them."""

_TAG = 1 << 16


class HeadExchange:
    """An all-to-all over heads in both directions; all ranks call it alike.

    Args:
        transport: Between the ranks.
        traffic: Where to count.
    """

    def __init__(self, transport: Transport, traffic: Traffic) -> None:
        self._transport, self._traffic = transport, traffic

    def to_heads(self, tensors: Sequence[Tensor], heads: Sequence[Heads], spans: Spans) -> list[Tensor]:
        """All tokens of this rank's heads.

        Args:
            tensors: (B, H, s, D) each, of one dtype.
            heads: For each tensor which of its heads go to which rank.
            spans: Which tokens each rank has.

        Returns:
            For each tensor (B, h, S, D), h being the number of heads of a rank.
        """
        rank, tokens = self._transport.rank, tensors[0].shape[2]
        shapes = [(tokens, len(x), len(own[0]), x.shape[3]) for x, own in zip(tensors, heads, strict=True)]
        whole = [
            x.new_empty((self._transport.size * tokens, *shape[1:])) for x, shape in zip(tensors, shapes, strict=True)
        ]

        def pieces(to: int) -> list[Tensor]:
            return [_pick(x, own[to]).permute(2, 0, 1, 3) for x, own in zip(tensors, heads, strict=True)]

        def take(given: Sequence[Tensor], source: int) -> None:
            for out, piece in zip(whole, given, strict=True):
                before = 0
                for start, stop in spans[source]:
                    out[start:stop].copy_(piece[before : before + stop - start])
                    before += stop - start

        def fill(message: Sequence[Tensor], to: int) -> None:
            for out, piece in zip(message, pieces(to), strict=True):
                out.copy_(piece)

        self._exchange(tensors[0].dtype, shapes, fill, lambda: take(pieces(rank), rank), take)
        return [out.permute(1, 2, 0, 3) for out in whole]

    def to_tokens(
        self,
        tensors: Sequence[Tensor],
        heads: Sequence[Heads],
        totals: Sequence[int],
        spans: Spans,
    ) -> list[Tensor]:
        """All heads of this rank's tokens. What several ranks hold of one head is added up, halves in fp32.

        Args:
            tensors: (B, h, S, D) each, of one dtype.
            heads: For each tensor which heads each rank has.
            totals: For each tensor the number of all heads, H.
            spans: Which tokens go to which rank.

        Returns:
            For each tensor (B, H, s, D).
        """
        rank, size, dtype = self._transport.rank, self._transport.size, tensors[0].dtype
        tokens = tensors[0].shape[2] // size
        shapes = [(tokens, x.shape[0], x.shape[1], x.shape[3]) for x in tensors]
        repeated = [sum(map(len, own)) > total for own, total in zip(heads, totals, strict=True)]
        results = [
            x.new_zeros((len(x), tokens, total, x.shape[3]), dtype=accumulator(dtype))
            if again
            else x.new_empty((len(x), tokens, total, x.shape[3]), dtype=dtype)
            for x, total, again in zip(tensors, totals, repeated, strict=True)
        ]

        def fill(message: Sequence[Tensor], to: int) -> None:
            for out, x in zip(message, tensors, strict=True):
                before = 0
                for start, stop in spans[to]:
                    out[before : before + stop - start].copy_(x[:, :, start:stop].permute(2, 0, 1, 3))
                    before += stop - start

        def take(given: Sequence[Tensor], source: int) -> None:
            for out, piece, own, again in zip(results, given, heads, repeated, strict=True):
                _put(out.permute(1, 0, 2, 3), piece, own[source], add=again)

        def take_own() -> None:
            for out, x, own, again in zip(results, tensors, heads, repeated, strict=True):
                before = 0
                for start, stop in spans[rank]:
                    place = out.permute(1, 0, 2, 3)[before : before + stop - start]
                    _put(place, x[:, :, start:stop].permute(2, 0, 1, 3), own[rank], add=again)
                    before += stop - start

        self._exchange(dtype, shapes, fill, take_own, take)
        return [out.to(dtype).permute(0, 2, 1, 3) for out in results]

    def _exchange(
        self,
        dtype: torch.dtype,
        shapes: Sequence[tuple[int, ...]],
        fill: Callable[[Sequence[Tensor], int], None],
        take_own: Callable[[], None],
        take: Callable[[Sequence[Tensor], int], None],
    ) -> None:
        """One message of pieces of these shapes to every rank; what this rank gives itself is seen to while they are under way."""
        rank, size = self._transport.rank, self._transport.size
        numel = sum(map(math.prod, shapes))
        if size > 1 and numel:
            self._traffic.add("all_to_all", size * numel * dtype.itemsize)
            buffer = self._transport.allocate((size - 1) * numel, dtype)
            others = [to for to in range(size) if to != rank]
            for message, to in zip(buffer.chunk(size - 1), others, strict=True):
                fill(_sections(message, shapes), to)
            # Nobody asks for this rank's own part of the message, so any tensor of its size will do.
            arrival = self._transport.scatter(buffer, _TAG, own=buffer[:numel])
            take_own()
            for source, message in enumerate(arrival.wait()):
                if source != rank:
                    take(_sections(message, shapes), source)
            arrival.release()
        else:
            take_own()


def _sections(message: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    return [
        part.view(shape)
        for part, shape in zip(torch.split(message, [math.prod(s) for s in shapes]), shapes, strict=True)
    ]


def _run(heads: tuple[int, ...]) -> slice | list[int]:
    """The heads as a slice if they follow each other, of which no copy is made."""
    first, last = heads[0], heads[-1]
    return slice(first, last + 1) if heads == tuple(range(first, last + 1)) else list(heads)


def _pick(x: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Those heads of (B, H, s, D)."""
    return x[:, _run(heads)]


def _put(whole: Tensor, piece: Tensor, heads: tuple[int, ...], *, add: bool) -> None:
    """Writes (s, B, h, D) where those heads are in (s, B, H, D), or adds it."""
    run = _run(heads)
    if isinstance(run, slice):
        place = whole[:, :, run]
        place.add_(piece) if add else place.copy_(piece)
        return
    for index, head in enumerate(heads):
        whole[:, :, head] += piece[:, :, index]

"""Which pairs of queries and keys are computed: rectangles of them, each without a mask, on the diagonal, or with a mask of its own.

Everything here is a function of values. Rows are places among the tokens that one place of the ring holds (see `SequenceCut`), in the
order of positions; so those of padding are the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightning_5d.context_parallel.cut import SequenceCut
from lightning_5d.context_parallel.masks import AttentionMask

Span = tuple[int, int]
Kind = Literal["full", "causal", "masked"]

# Queries of a tile whose mask depends on single tokens. More make fewer calls, fewer leave out more of what no query sees.
_PIECE = 512


@dataclass(frozen=True)
class Tile:
    """Queries of one place of the ring that meet keys of one place in a single call.

    Attributes:
        queries: Rows (start, stop) of the place that computes.
        keys: Rows of the place whose keys they are.
        kind: All pairs, those of a triangle (as many queries as keys, at the same positions), or those of a mask.
    """

    queries: Span
    keys: Span
    kind: Kind

    @property
    def work(self) -> int:
        """Pairs that a kernel has to compute."""
        queries, keys = self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]
        return queries * (queries + 1) // 2 if self.kind == "causal" else queries * keys


@dataclass(frozen=True)
class Plan:
    """What one place of the ring computes and exchanges in a call.

    Attributes:
        tiles: By the place whose keys they need.
        needs: The rows of each place's keys that this one needs.
        serves: The rows of this place's keys that each one needs.
        blind: Whether there may be queries that see no key.
    """

    tiles: tuple[tuple[Tile, ...], ...]
    needs: tuple[Span | None, ...]
    serves: tuple[Span | None, ...]
    blind: bool

    @property
    def work(self) -> int:
        """Pairs of a query and a key that this place computes, for one sequence and head."""
        return sum(tile.work for tiles in self.tiles for tile in tiles)


def plan(mask: AttentionMask, cut: SequenceCut, place: int) -> Plan:
    """What a place of the ring has to do: made once for each kind of mask, or for each mask that depends on single tokens."""
    if mask.plain:
        return _plain_plan(mask.causal, cut, place)
    plans = _of_tokens.setdefault(mask, {})
    if (found := plans.get((cut, place))) is None:
        if _says_nothing(mask, cut.length):
            found = _plain_plan(mask.causal, cut, place)
        else:
            found = _plan(Reach.of(mask, cut).tiles, cut.places, place, blind=True)
        plans[cut, place] = found
    return found


_of_tokens: WeakKeyDictionary[AttentionMask, dict[tuple[SequenceCut, int], Plan]] = WeakKeyDictionary()


def _says_nothing(mask: AttentionMask, length: int) -> bool:
    """Whether a mask does the same without what it says about single tokens."""
    if mask.window is not None and mask.window < length:
        return False
    if mask.keys is not None and not bool(mask.keys.all()):
        return False
    return mask.documents is None or bool((mask.documents == mask.documents[:, :1]).all())


def _plan(tiles: Callable[[int, int], tuple[Tile, ...]], places: int, place: int, blind: bool) -> Plan:
    own = tuple(tiles(place, owner) for owner in range(places))
    served = [tiles(other, place) for other in range(places)]
    return Plan(own, tuple(map(_keys, own)), tuple(map(_keys, served)), blind)


@lru_cache(maxsize=256)
def _plain_plan(causal: bool, cut: SequenceCut, place: int) -> Plan:
    return _plan(lambda queries, keys: plain_tiles(causal, cut, queries, keys), cut.places, place, blind=False)


def _keys(tiles: Sequence[Tile]) -> Span | None:
    if not tiles:
        return None
    return min(tile.keys[0] for tile in tiles), max(tile.keys[1] for tile in tiles)


def plain_tiles(causal: bool, cut: SequenceCut, queries: int, keys: int) -> tuple[Tile, ...]:
    """The tiles of one place's queries and another's keys where single tokens do not matter."""
    rows = cut.padded // cut.places
    if not causal:
        held = held_rows(cut, keys)
        return (Tile((0, rows), (0, held), "full"),) if held else ()
    if queries == keys:
        # What a place holds is in the order of positions, so its own triangle is one, whatever is between its spans.
        return (Tile((0, rows), (0, rows), "causal"),)
    found: list[Tile] = []
    before = 0
    for start, stop in cut.place_spans(queries):
        span = (before, before + stop - start)
        before = span[1]
        # Spans of different places do not overlap: a query sees all of one or nothing, and those of earlier positions come first.
        seen = sum(last - first for first, last in cut.place_spans(keys) if first < start)
        if not seen:
            continue
        if found and found[-1].keys[1] == seen and found[-1].queries[1] == span[0]:
            span = (found.pop().queries[0], span[1])
        found.append(Tile(span, (0, seen), "full"))
    return tuple(found)


def held_rows(cut: SequenceCut, place: int) -> int:
    """Rows of a place of the ring that are not padding."""
    return sum(max(0, min(stop, cut.length) - start) for start, stop in cut.place_spans(place))


def place_positions(cut: SequenceCut, place: int, rows: Span, device: torch.device | None = None) -> Tensor:
    """The positions of rows of a place of the ring, int64."""
    pieces, before = [], 0
    for start, stop in cut.place_spans(place):
        low, high = max(rows[0] - before, 0), min(rows[1] - before, stop - start)
        if low < high:
            pieces.append(torch.arange(start + low, start + high, device=device))
        before += stop - start
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def tile_mask(
    mask: AttentionMask, cut: SequenceCut, tile: Tile, queries: int, keys: int, device: torch.device
) -> Tensor:
    """The pairs that count in a tile, (B|1, 1, q, k), bool.

    Args:
        mask: What queries see.
        cut: Who holds what.
        tile: Of kind ``"masked"``.
        queries: The place of its queries.
        keys: The place of its keys.
        device: Where the mask is needed.
    """
    q = place_positions(cut, queries, tile.queries, device)
    k = place_positions(cut, keys, tile.keys, device)
    distance = q[:, None] - k[None]
    seen = (k < cut.length)[None].expand_as(distance)
    if mask.causal:
        seen = seen & (distance >= 0)
    if mask.window is not None:
        seen = seen & (distance.abs() < mask.window)
    seen = seen[None]
    q, k = q.clamp(max=cut.length - 1), k.clamp(max=cut.length - 1)
    if mask.keys is not None:
        seen = seen & mask.keys.to(device)[:, None, k]
    if mask.documents is not None:
        documents = mask.documents.to(device)
        seen = seen & (documents[:, q, None] == documents[:, None, k])
    return seen[:, None]


@dataclass(frozen=True, eq=False)
class Reach:
    """From where to where each query sees, over all sequences of a batch: what decides which tiles there are.

    Attributes:
        cut: Who holds what.
        causal: Whether queries see no later key.
        some: (2, padded): the span of positions outside of which a query of this position sees nothing, in any sequence.
        every: (2, padded): the span in which it sees every key that is not a hole, in all of them.
        holes: (padded + 1,): how many keys before this position are not seen in some sequence, whoever asks.
    """

    cut: SequenceCut
    causal: bool
    some: Tensor
    every: Tensor
    holes: Tensor

    @classmethod
    def of(cls, mask: AttentionMask, cut: SequenceCut) -> Reach:
        """Of a mask."""
        length, padded = cut.length, cut.padded
        # Padding asks as the last token does, so that it does not stand in the way of a tile without a mask.
        position = torch.arange(padded).clamp(max=length - 1)
        low, high = torch.zeros(padded, dtype=torch.int64), torch.full((padded,), length)
        if mask.causal:
            high = position + 1
        if mask.window is not None:
            low = (position - mask.window + 1).clamp(min=0)
            high = torch.minimum(high, position + mask.window)
        some, every = torch.stack([low, high]), torch.stack([low, high])
        holes = torch.zeros(padded, dtype=torch.int64)
        holes[length:] = 1
        if mask.documents is not None:
            first, last, gaps = _documents(mask.documents.cpu())
            some = torch.stack([some[0].maximum(first.amin(0)[position]), some[1].minimum(last.amax(0)[position])])
            every = torch.stack([every[0].maximum(first.amax(0)[position]), every[1].minimum(last.amin(0)[position])])
            if gaps:
                every = torch.full_like(every, padded)  # no span is seen whole
        if mask.keys is not None:
            keys = mask.keys.cpu()
            if keys.shape[-1] and not bool(keys.all()):
                holes[:length] = ~keys.all(0)
                seen = keys.any(0).nonzero().flatten()
                bounds = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, 0)
                some = torch.stack([some[0].clamp(min=bounds[0]), some[1].clamp(max=bounds[1])])
        holes = torch.cat([holes.new_zeros(1), holes.cumsum(0)])
        return cls(cut, mask.causal, some, every, holes)

    def tiles(self, queries: int, keys: int) -> tuple[Tile, ...]:
        """The tiles of one place's queries and another's keys."""
        found: list[Tile] = []
        pieces = _pieces(self.cut, queries)
        for rows in pieces:
            asked = place_positions(self.cut, queries, rows)
            first, low, high = int(asked[0]), int(self.some[0, asked].min()), int(self.some[1, asked].max())
            inner = int(self.every[0, asked].max()), int(self.every[1, asked].min())
            # A piece's own triangle is worth a call of its own, which then needs no mask.
            apart = self.causal and queries == keys and len(pieces) > 1 and low < first < high
            for span in ((low, first), (first, high)) if apart else ((low, high),):
                if (tile := self._tile(rows, span, first, inner, queries == keys, keys)) is not None:
                    _append(found, tile)
        return tuple(found)

    def _tile(self, rows: Span, seen: Span, first: int, inner: Span, own: bool, keys: int) -> Tile | None:
        """The tile of a piece of queries, of which the first is at a position, and the keys of a place in a span of positions."""
        low, high = seen
        met: list[tuple[Span, Span]] = []
        before = 0
        for start, stop in self.cut.place_spans(keys):
            if max(start, low) < min(stop, high):
                part = max(start, low), min(stop, high)
                met.append(((before + part[0] - start, before + part[1] - start), part))
            before += stop - start
        if not met:
            return None
        # What is seen is a span of positions, and rows are in their order: from the first to the last, all are in it.
        found = (met[0][0][0], met[-1][0][1])
        kind: Kind = "masked"
        if not any(int(self.holes[stop] - self.holes[start]) for _, (start, stop) in met):
            if all(inner[0] <= start and stop <= inner[1] for _, (start, stop) in met):
                kind = "full"
            elif self.causal and own and rows == found and inner[0] <= first:
                kind = "causal"
        return Tile(rows, found, kind)


def _append(tiles: list[Tile], tile: Tile) -> None:
    last = tiles[-1] if tiles else None
    if last and last.kind == tile.kind == "full" and last.keys == tile.keys and last.queries[1] == tile.queries[0]:
        tiles[-1] = Tile((last.queries[0], tile.queries[1]), tile.keys, "full")
    else:
        tiles.append(tile)


def _documents(documents: Tensor) -> tuple[Tensor, Tensor, bool]:
    """First position and end of each token's document, (B, S) each, and whether one has others in between."""
    batch, length = documents.shape
    _, number = torch.unique(documents, return_inverse=True)
    number = number + torch.arange(batch)[:, None] * (int(number.max()) + 1)
    count = int(number.max()) + 1
    position = torch.arange(length).expand(batch, length).flatten()
    flat = number.flatten()
    first = torch.full((count,), length).scatter_reduce(0, flat, position, "amin")
    last = torch.full((count,), -1).scatter_reduce(0, flat, position, "amax") + 1
    held = torch.bincount(flat, minlength=count)
    gaps = bool(((last - first) != held)[held > 0].any())
    return first[number], last[number], gaps


def _pieces(cut: SequenceCut, place: int) -> list[Span]:
    """Rows of a place whose tiles are looked at alone: all of them if they are few, else pieces of its spans."""
    rows = cut.padded // cut.places
    if rows <= _PIECE:
        return [(0, rows)]
    found, before = [], 0
    for start, stop in cut.place_spans(place):
        width = stop - start
        found += [(before + low, before + min(low + _PIECE, width)) for low in range(0, width, _PIECE)]
        before += width
    return found

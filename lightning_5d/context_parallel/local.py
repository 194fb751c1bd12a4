"""Attention of a rank's queries to keys that it has in one piece, in the order of positions.

What queries see is worked out in tiles: some queries, and the range of keys that holds all they see. Nothing is computed outside of
those ranges, and masks exist for one tile at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lightning_5d.context_parallel.attention import accumulator
from lightning_5d.context_parallel.masks import AttentionMask

Range = tuple[int, int]

# Queries of a tile where masks differ from token to token: ranges of keys are tighter with fewer, kernels busier with more.
_QUERIES = 512


@dataclass(frozen=True)
class Tile:
    """Queries, and the keys that they see at most.

    Attributes:
        queries: Their positions (start, stop).
        keys: Positions of the keys.
        causal: Both are the same positions, and queries see keys up to their own.
        masked: Which keys a query sees takes a mask, which says it all.
    """

    queries: Range
    keys: Range
    causal: bool = False
    masked: bool = False


def tiles_of(mask: AttentionMask, queries: Range, length: int, *, own_first: bool = False) -> Iterator[Tile]:
    """The tiles of a span of queries over all keys of the sequence; those that see nothing are left out.

    Args:
        mask: What queries see.
        queries: The span of positions; ends before `length`.
        length: Tokens of the sequence.
        own_first: Whether the span's own keys are wanted apart, and first, where that costs no mask.
    """
    start, stop = queries
    if start >= stop:
        return
    if not mask.plain:
        documents = None if mask.documents is None else _extents(mask.documents)
        for first in range(start, stop, _QUERIES):
            here = first, min(first + _QUERIES, stop)
            low, high = _seen(mask, here, length, documents)
            if low < high:
                yield Tile(here, (low, high), masked=True)
    elif mask.causal:
        yield Tile(queries, queries, causal=True)
        if start:
            yield Tile(queries, (0, start))
    elif own_first and queries != (0, length):
        yield Tile(queries, queries)
        for keys in ((0, start), (stop, length)):
            if keys[0] < keys[1]:
                yield Tile(queries, keys)
    else:
        yield Tile(queries, (0, length))


def mask_of(mask: AttentionMask, tile: Tile, device: torch.device) -> Tensor | None:
    """What the queries of a tile see of its keys, (B or 1, 1, queries, keys), bool."""
    if not tile.masked:
        return None
    i = torch.arange(*tile.queries, device=device)[:, None]
    j = torch.arange(*tile.keys, device=device)[None]
    seen = j <= i if mask.causal else torch.ones(len(i), j.shape[1], dtype=torch.bool, device=device)
    if mask.window is not None:
        seen = seen & ((i - j).abs() < mask.window)
    seen = seen[None]
    if mask.documents is not None:
        documents = mask.documents.to(device)
        seen = seen & (documents[:, slice(*tile.queries), None] == documents[:, None, slice(*tile.keys)])
    if mask.keys is not None:
        seen = seen & mask.keys.to(device)[:, None, slice(*tile.keys)]
    return seen[:, None]


def _seen(mask: AttentionMask, queries: Range, length: int, documents: tuple[Tensor, Tensor] | None) -> Range:
    """A range with all keys that a span of queries sees."""
    (start, stop), low, high = queries, 0, length
    if mask.window is not None:
        low, high = max(low, start - mask.window + 1), min(high, stop + mask.window - 1)
    if mask.causal:
        high = min(high, stop)
    if documents is not None:
        first, last = documents
        low = max(low, int(first[:, start:stop].min()))
        high = min(high, int(last[:, start:stop].max()) + 1)
    return low, high


def _extents(documents: Tensor) -> tuple[Tensor, Tensor]:
    """The first and last position of each token's document, (B, S) each, on the CPU."""
    documents = documents.cpu()
    rows, length = documents.shape
    ids, number = documents.unique(return_inverse=True)
    positions = torch.arange(length).expand(rows, length)
    first = torch.full((rows, len(ids)), length).scatter_reduce(1, number, positions, "amin")
    last = torch.full((rows, len(ids)), -1).scatter_reduce(1, number, positions, "amax")
    return first.gather(1, number), last.gather(1, number)


class Outputs:
    """Outputs of a rank's queries, joined over tiles of keys in fp32 through the logarithms of their sums.

    Args:
        q: (B, H, s, D).
        scale: Of the scores.
    """

    def __init__(self, q: Tensor, scale: float) -> None:
        self._q, self._scale = q, scale
        self._rows: dict[Range, tuple[Tensor, Tensor]] = {}

    def add(self, rows: Range, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool) -> None:
        """Attends from those rows of the queries to some keys.

        Args:
            rows: Rows of the queries (start, stop); the same for all tiles that share rows.
            k: (B, K, n, D).
            v: (B, K, n, D).
            mask: (B or 1, 1, rows, n), bool, or ``None`` for all.
            causal: Whether the k-th query sees k keys; there are as many of both then.
        """
        out, lse = block_forward(self._q[:, :, slice(*rows)], k, v, causal=causal, mask=mask, scale=self._scale)
        if (before := self._rows.get(rows)) is not None:
            out, lse = join(*before, out, lse)
        self._rows[rows] = out, lse

    def whole(self) -> tuple[Tensor, Tensor]:
        """The outputs (B, H, s, D), zero where a query has seen nothing, and the logarithms (B, H, s)."""
        q = self._q
        if len(self._rows) == 1 and (found := self._rows.get((0, q.shape[2]))) is not None:
            return found[0].to(q.dtype), found[1]
        batch, heads, tokens, size = q.shape
        out = q.new_empty((batch, tokens, heads, size)).transpose(1, 2)
        lse = q.new_empty((batch, heads, tokens), dtype=accumulator(q.dtype))
        before = 0
        for rows in (*sorted(self._rows), (tokens, tokens)):
            if before < rows[0]:
                out[:, :, before : rows[0]] = 0
                lse[:, :, before : rows[0]] = -torch.inf
            if rows[0] < rows[1]:
                out[:, :, slice(*rows)], lse[:, :, slice(*rows)] = self._rows[rows]
            before = rows[1]
        return out, lse


class Gradients:
    """Gradients of a rank's queries and of keys and values, summed over tiles.

    Args:
        g: Of the outputs, (B, H, s, D).
        q: (B, H, s, D).
        out: The joined outputs.
        lse: Their logarithms.
        keys: Keys of which gradients are wanted.
        kv_heads: Key and value heads.
        scale: Of the scores.

    Attributes:
        q: Of the queries, (B, H, s, D), in fp32 or fp64.
        k: Of keys, (B, K, keys, D), likewise.
        v: Of values, likewise.
    """

    def __init__(
        self, g: Tensor, q: Tensor, out: Tensor, lse: Tensor, keys: int, kv_heads: int, scale: float
    ) -> None:
        self._g, self._query, self._out, self._lse, self._scale = g, q, out, lse, scale
        batch, heads, tokens, size = q.shape

        def zeros(length: int, count: int) -> Tensor:
            made = q.new_zeros((length, batch, count, size), dtype=accumulator(q.dtype))
            return made.permute(1, 2, 0, 3)

        self.q = q.new_zeros((batch, tokens, heads, size), dtype=accumulator(q.dtype)).transpose(1, 2)
        self.k, self.v = zeros(keys, kv_heads), zeros(keys, kv_heads)

    def add(self, rows: Range, k: Tensor, v: Tensor, mask: Tensor | None, keys: Range, *, causal: bool) -> None:
        """Goes back through what `Outputs.add` did with the same arguments; `keys` are the places of their gradients."""
        at = slice(*rows)
        dq, dk, dv = block_backward(
            self._g[:, :, at],
            self._query[:, :, at],
            k,
            v,
            self._out[:, :, at],
            self._lse[:, :, at],
            causal=causal,
            mask=mask,
            scale=self._scale,
        )
        self.q[:, :, at] += dq
        self.k[:, :, slice(*keys)] += dk
        self.v[:, :, slice(*keys)] += dv


def attend(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> Tensor:
    """Softmax attention over whole sequences, with a graph.

    Args:
        q: (B, H, S, D), all tokens in the order of positions.
        k: (B, K, S, D).
        v: (B, K, S, D).
        mask: What queries see.
        scale: Of the scores.

    Returns:
        (B, H, S, D).
    """
    out: Tensor = _Attend.apply(q, k, v, mask, scale)  # type: ignore[no-untyped-call]
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> Tensor:
        outputs, length = Outputs(q, scale), q.shape[2]
        for tile in tiles_of(mask, (0, length), length):
            at = slice(*tile.keys)
            outputs.add(tile.queries, k[:, :, at], v[:, :, at], mask_of(mask, tile, q.device), causal=tile.causal)
        out, lse = outputs.whole()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mask, ctx.scale = mask, scale  # type: ignore[attr-defined]
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        length = q.shape[2]
        tiles = list(tiles_of(ctx.mask, (0, length), length))
        if len(tiles) == 1 and tiles[0].queries == tiles[0].keys == (0, length):
            tile = tiles[0]
            mask = mask_of(ctx.mask, tile, q.device)
            found = block_backward(g, q, k, v, out, lse, causal=tile.causal, mask=mask, scale=ctx.scale)
            return *found, None, None
        gradients = Gradients(g, q, out, lse, length, k.shape[1], ctx.scale)
        for tile in tiles:
            at = slice(*tile.keys)
            mask = mask_of(ctx.mask, tile, q.device)
            gradients.add(tile.queries, k[:, :, at], v[:, :, at], mask, tile.keys, causal=tile.causal)
        return gradients.q.to(q.dtype), gradients.k.to(k.dtype), gradients.v.to(v.dtype), None, None


def join(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.logaddexp(lse, other_lse)
    kept = torch.where(both == -torch.inf, 0.0, both)
    return out * (lse - kept).exp()[..., None] + other * (other_lse - kept).exp()[..., None], both


def block_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    added = None if mask is None else torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=added, scale=scale)
    if mask is not None:
        lse = lse.masked_fill(~mask.any(-1), -torch.inf)
    return out, lse


def block_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    added = None if mask is None else torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    lse = torch.where(lse == -torch.inf, 0.0, lse)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(g, q, k, v, out, lse, 0.0, causal, attn_mask=added, scale=scale)

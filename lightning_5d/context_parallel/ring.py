"""Ring attention: every rank computes with its own queries, and keys and values come to it block by block.

Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers" (2023).
"""

# [Note: what overlaps]
# The exchange of a block is started before the block before it is computed with, in both directions. Between ranks of one host
# blocks are read in place: the own block comes first in the forward, so that others have time to publish theirs, and last in the
# backward, where those of others are there already, so that gradients from others have time to arrive.

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_5d.context_parallel import kernels
from lightning_5d.context_parallel.attention import ContextAttention, accumulator, default_scale
from lightning_5d.context_parallel.cut import SequenceCut
from lightning_5d.context_parallel.exchange import Block, KeyValueExchange, Lent, open_exchange
from lightning_5d.context_parallel.joining import Joined, RowSum, rows_of
from lightning_5d.context_parallel.masks import AttentionMask
from lightning_5d.context_parallel.tiles import Plan, Span, Tile, plan, tile_mask

# Masks of tiles are kept for the other layers of a step up to so many bytes; beyond, each call makes its own.
_KEPT_MASKS = 64 << 20


class RingAttention(ContextAttention):
    """Attention over the ranks of a group, the places of the ring.

    No rank ever has more than its own block of keys and values and two others. Rank r of c sends, of a block of b bytes (keys and
    values), in a forward: ``(c - 1) b`` if attention is full; if it is causal ``(c - 1 - r) b`` of contiguous parts and
    ``(r + (c - 1 - r) / 2) b`` of zigzag parts. In a backward it sends gradients of as many bytes as it received keys and values, and
    between hosts keys and values again.

    Args:
        group: The ranks.
        device: Where their tensors are.
        shared_memory: CPU ranks of one host read straight from each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, shared_memory: bool = True) -> None:
        self.exchange: KeyValueExchange = open_exchange(group, device, shared_memory=shared_memory)
        self.traffic = self.exchange.traffic
        self._masks: WeakKeyDictionary[AttentionMask, _TileMasks] = WeakKeyDictionary()

    @override
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, cut: SequenceCut, scale: float | None = None
    ) -> Tensor:
        self._check(q, k, v, cut)
        q, k, v = kernels.in_autocast(q, k, v)
        scale = default_scale(q.shape[-1], scale)
        if not q.numel():
            return (q.sum(-1, keepdim=True) + k.sum() + v.sum()).expand(*q.shape[:-1], v.shape[-1])
        if mask.plain:
            masks = None
        elif (masks := self._masks.get(mask)) is None:
            masks = self._masks[mask] = _TileMasks()
        call = _Call(self.exchange, plan(mask, cut, self.exchange.rank), mask, cut, scale, masks)
        size = v.shape[-1]
        if size != q.shape[-1]:
            q, k, v = kernels.same_head_size(q, k, v)
        out: Tensor = _Ring.apply(q, k, v, call)  # type: ignore[no-untyped-call]
        return out if out.shape[-1] == size else out[..., :size]

    @override
    def memory(self) -> Iterable[Tensor]:
        return self.exchange.memory()

    @override
    def mapped(self) -> Iterable[Tensor]:
        return self.exchange.mapped()

    @override
    def close(self) -> None:
        self.exchange.close()

    def _check(self, q: Tensor, k: Tensor, v: Tensor, cut: SequenceCut) -> None:
        if cut.places != self.exchange.size:
            raise ValueError(
                f"The sequence is cut for a ring of {cut.places} places; there are {self.exchange.size} ranks."
            )
        rows = cut.padded // cut.places
        if {x.shape[-2] for x in (q, k, v)} != {rows}:
            raise ValueError(
                f"Queries, keys and values have {q.shape[-2]}, {k.shape[-2]} and {v.shape[-2]} tokens; each place of the ring holds {rows} of"
                f" {cut.length}. Attention between sequences of different lengths is not computed by a ring."
            )
        if q.shape[1] % k.shape[1] or k.shape[:-1] != v.shape[:-1] or k.shape[-1] != q.shape[-1]:
            raise ValueError(
                f"Queries of shape {tuple(q.shape)} do not fit keys {tuple(k.shape)} and values {tuple(v.shape)}: (B, H, s, D), and"
                " (B, K, s, D) where K divides H."
            )


class _TileMasks:
    """The masks of a step's tiles, made once for all layers as far as there is room."""

    def __init__(self) -> None:
        self._found: dict[tuple[SequenceCut, int, Tile], Tensor] = {}
        self._nbytes = 0

    def get(self, mask: AttentionMask, cut: SequenceCut, tile: Tile, place: int, owner: int, like: Tensor) -> Tensor:
        key = (cut, owner, tile)
        if (found := self._found.get(key)) is None:
            found = tile_mask(mask, cut, tile, place, owner, like.device)
            if self._nbytes + found.nbytes <= _KEPT_MASKS:
                self._found[key] = found
                self._nbytes += found.nbytes
        return found


class _Call:
    """One attention: what is to be done, and with what."""

    def __init__(
        self,
        exchange: KeyValueExchange,
        plan: Plan,
        mask: AttentionMask,
        cut: SequenceCut,
        scale: float,
        masks: _TileMasks | None,
    ) -> None:
        self.exchange, self.plan, self.scale = exchange, plan, scale
        self.rank, self.hops = exchange.rank, range(1, exchange.size)
        self._mask, self._cut, self._masks = mask, cut, masks

    def mask(self, tile: Tile, owner: int, like: Tensor) -> Tensor | None:
        """The mask of a tile, if it has one."""
        if tile.kind != "masked" or self._masks is None:
            return None
        return self._masks.get(self._mask, self._cut, tile, self.rank, owner, like)

    def first(self, owner: int) -> int:
        """The first row of what is here of a rank's block."""
        rows = self.plan.needs[owner]
        return 0 if owner == self.rank or rows is None else rows[0]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        exchange, plan = call.exchange, call.plan
        lent = exchange.lend(k, v, plan)
        if call.hops:
            lent.start(1)
        joined = Joined(q, plan.blind)
        _attend(joined, call, call.rank, q, lent.own)
        taken: list[Tensor] = []
        for _, owner, block in _arriving(lent, call):
            if block is not None:
                _attend(joined, call, owner, q, block)
                if exchange.lasting:
                    taken += block
        lent.finish()
        out, lse = joined.result()
        if any(ctx.needs_input_grad):
            ctx.call, ctx.number = call, lent.number
            ctx.save_for_backward(q, *lent.own, out, kernels.blind(lse) if plan.blind else lse, *taken)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        call: _Call = ctx.call
        exchange = call.exchange
        q, k, v, out, lse, *taken = ctx.saved_tensors
        parts = _Parts(call, grad, q, out, lse)
        home = _Home(call, k)
        if exchange.lasting:
            number = ctx.number
            blocks = iter(taken)
            for hop in call.hops:
                owner = exchange.owner(hop)
                block = Block(next(blocks), next(blocks)) if call.plan.tiles[owner] else None
                home.send(number, hop, None if block is None else parts.of(owner, block))
            home.add_own(parts.of(call.rank, Block(k, v)))
        else:
            lent = exchange.lend(k, v, call.plan)
            number = lent.number
            if call.hops:
                lent.start(1)
            home.add_own(parts.of(call.rank, Block(k, v)))
            for hop, owner, block in _arriving(lent, call):
                home.send(number, hop, None if block is None else parts.of(owner, block))
        home.finish(number)
        return parts.dq.result(q), home.dk.result(k), home.dv.result(v), None


def _arriving(lent: Lent, call: _Call) -> Iterator[tuple[int, int, Block | None]]:
    """The blocks of the others as they come, of each hop; the next one is on its way while one is computed with."""
    for hop in call.hops:
        owner = call.exchange.owner(hop)
        block = lent.take(hop) if call.plan.tiles[owner] else None
        if hop < call.hops[-1]:
            lent.start(hop + 1)
        yield hop, owner, block


def _attend(joined: Joined, call: _Call, owner: int, q: Tensor, block: Block) -> None:
    """Computes and joins the tiles of a block."""
    first = call.first(owner)
    for tile in call.plan.tiles[owner]:
        out, lse = kernels.forward(
            rows_of(q, tile.queries),
            rows_of(block.k, tile.keys, first),
            rows_of(block.v, tile.keys, first),
            causal=tile.kind == "causal",
            mask=call.mask(tile, owner, q),
            scale=call.scale,
        )
        joined.add(tile.queries, out, lse)


class _Parts:
    """The gradients that this rank's queries give, block by block."""

    def __init__(self, call: _Call, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> None:
        self._call, self._grad, self._q, self._out, self._lse = call, grad, q, out, lse
        self.dq = RowSum(q.shape[2], accumulator(q.dtype))

    def of(self, owner: int, block: Block) -> Block | None:
        """Of a block, for the rows of its keys that are needed; ``None`` if none is."""
        call = self._call
        tiles, needed = call.plan.tiles[owner], call.plan.needs[owner]
        if needed is None:
            return None
        first = call.first(owner)
        width = needed[1] - needed[0]
        sums = [RowSum(width, accumulator(block.k.dtype)) for _ in range(2)] if len(tiles) > 1 else None
        for tile in tiles:
            part = kernels.backward(
                rows_of(self._grad, tile.queries),
                rows_of(self._q, tile.queries),
                rows_of(block.k, tile.keys, first),
                rows_of(block.v, tile.keys, first),
                rows_of(self._out, tile.queries),
                rows_of(self._lse, tile.queries),
                causal=tile.kind == "causal",
                mask=call.mask(tile, owner, self._q),
                scale=call.scale,
            )
            self.dq.add(tile.queries, part.q_BHqD, ours=True)
            if sums is None:
                return Block(part.k_BKkD, part.v_BKkD)
            keys = (tile.keys[0] - needed[0], tile.keys[1] - needed[0])
            for total, each in zip(sums, (part.k_BKkD, part.v_BKkD), strict=True):
                total.add(keys, each, ours=True)
        return Block(*(total.whole(block.k) for total in sums or ()))


class _Home:
    """The gradients of this rank's keys and values, from its own queries and those of others."""

    def __init__(self, call: _Call, k: Tensor) -> None:
        self._call, self._k = call, k
        rows, dtype = k.shape[2], accumulator(k.dtype)
        self.dk, self.dv = RowSum(rows, dtype), RowSum(rows, dtype)
        self._open: int | None = None

    def add_own(self, grads: Block | None) -> None:
        """Adds those of the own queries."""
        rows = self._call.plan.needs[self._call.rank]
        if grads is not None and rows is not None:
            self.dk.add(rows, grads.k, ours=True)
            self.dv.add(rows, grads.v, ours=True)

    def send(self, number: int, hop: int, grads: Block | None) -> None:
        """Sends the gradients of a hop's block to its owner, and adds what came in the hop before."""
        exchange = self._call.exchange
        exchange.send_home(number, hop, grads, self._rows(hop), self._k)
        self._collect(number)
        self._open = hop

    def finish(self, number: int) -> None:
        """Adds what is still to come."""
        self._collect(number)
        self._call.exchange.finish()

    def _rows(self, hop: int) -> Span | None:
        return self._call.plan.serves[self._call.exchange.reader(hop)]

    def _collect(self, number: int) -> None:
        hop, self._open = self._open, None
        if hop is None or (rows := self._rows(hop)) is None:
            return
        found = self._call.exchange.come_home(number, hop, rows, self._k)
        self.dk.add(rows, found.k, ours=False)
        self.dv.add(rows, found.v, ours=False)
        del found
        self._call.exchange.came_home()

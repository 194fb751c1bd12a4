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
from lightning_5d.context_parallel.inputs import check_inputs, of_nothing
from lightning_5d.context_parallel.joining import RowSum
from lightning_5d.context_parallel.local import Backward, Meeting, Outputs, TileMasks
from lightning_5d.context_parallel.masks import AttentionMask
from lightning_5d.context_parallel.tiles import Span


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
        self._masks: WeakKeyDictionary[AttentionMask, TileMasks] = WeakKeyDictionary()

    @override
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, cut: SequenceCut, scale: float | None = None
    ) -> Tensor:
        check_inputs(q, k, v, cut, self.exchange.size)
        q, k, v = kernels.in_autocast(q, k, v)
        scale = default_scale(q.shape[-1], scale)
        if not q.numel():
            return of_nothing(q, k, v)
        if mask.plain:
            masks = None
        elif (masks := self._masks.get(mask)) is None:
            masks = self._masks[mask] = TileMasks()
        call = _Call(self.exchange, Meeting(mask, cut, self.exchange.rank, scale, masks))
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


class _Call:
    """One attention: what is to be done, and with what."""

    def __init__(self, exchange: KeyValueExchange, meeting: Meeting) -> None:
        self.exchange, self.meeting, self.plan = exchange, meeting, meeting.plan
        self.rank, self.hops = exchange.rank, range(1, exchange.size)

    def first(self, owner: int) -> int:
        """The first row of what is here of a rank's block."""
        rows = self.plan.needs[owner]
        return 0 if owner == self.rank or rows is None else rows[0]

    def gradients(self, backward: Backward, owner: int, block: Block) -> Block | None:
        """What this rank's queries give to a block, for the rows of its keys that are needed; ``None`` if none is."""
        needed = self.plan.needs[owner]
        if needed is None:
            return None
        found = backward.add(owner, block.k, block.v, self.first(owner), needed)
        return None if found is None else Block(*found)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        exchange, plan = call.exchange, call.plan
        lent = exchange.lend(k, v, plan)
        if call.hops:
            lent.start(1)
        outputs = Outputs(q, call.meeting)
        outputs.add(call.rank, *lent.own)
        taken: list[Tensor] = []
        for _, owner, block in _arriving(lent, call):
            if block is not None:
                outputs.add(owner, *block, call.first(owner))
                if exchange.lasting:
                    taken += block
        lent.finish()
        out, lse = outputs.whole()
        if any(ctx.needs_input_grad):
            ctx.call, ctx.number = call, lent.number
            ctx.save_for_backward(q, *lent.own, out, lse, *taken)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        call: _Call = ctx.call
        exchange = call.exchange
        q, k, v, out, lse, *taken = ctx.saved_tensors
        backward = Backward(grad, q, out, lse, call.meeting)
        home = _Home(call, k)
        if exchange.lasting:
            number = ctx.number
            blocks = iter(taken)
            for hop in call.hops:
                owner = exchange.owner(hop)
                block = Block(next(blocks), next(blocks)) if call.plan.tiles[owner] else None
                home.send(number, hop, None if block is None else call.gradients(backward, owner, block))
            home.add_own(call.gradients(backward, call.rank, Block(k, v)))
        else:
            lent = exchange.lend(k, v, call.plan)
            number = lent.number
            if call.hops:
                lent.start(1)
            home.add_own(call.gradients(backward, call.rank, Block(k, v)))
            for hop, owner, block in _arriving(lent, call):
                home.send(number, hop, None if block is None else call.gradients(backward, owner, block))
        home.finish(number)
        return backward.queries(), home.dk.result(k), home.dv.result(v), None


def _arriving(lent: Lent, call: _Call) -> Iterator[tuple[int, int, Block | None]]:
    """The blocks of the others as they come, of each hop; the next one is on its way while one is computed with."""
    for hop in call.hops:
        owner = call.exchange.owner(hop)
        block = lent.take(hop) if call.plan.tiles[owner] else None
        if hop < call.hops[-1]:
            lent.start(hop + 1)
        yield hop, owner, block


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

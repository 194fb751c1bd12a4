"""All-gather attention: every rank lends the others its keys and values, and attends to those that its queries may see.

One exchange brings the keys and values of all ranks, and a rank attends to its own meanwhile. Backward gathers them again, since kept
they would take the memory of whole sequences in every layer, and a second exchange brings each rank what all of them found for its
keys and values; it is added up in fp32.

Source: Llama team, "The Llama 3 Herd of Models" (2024), section 3.3.2, with the own block first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from typing_extensions import override

from lightning_5d.context_parallel.attention import ContextAttention, accumulator, default_scale
from lightning_5d.context_parallel.cut import SequenceCut
from lightning_5d.context_parallel.inputs import check_inputs, of_nothing
from lightning_5d.context_parallel.joining import RowSum, rows_of
from lightning_5d.context_parallel.kernels import same_head_size
from lightning_5d.context_parallel.local import Backward, Meeting, Outputs
from lightning_5d.context_parallel.masks import AttentionMask
from lightning_5d.context_parallel.tiles import Plan
from lightning_5d.context_parallel.transports import open_transport
from lightning_5d.data_parallel.traffic import Traffic
from lightning_5d.data_parallel.transport import Transport

_GATHER_TAG, _SUM_TAG = (1 << 16) + 1, (1 << 16) + 2


class AllGatherAttention(ContextAttention):
    """Attention of each rank's queries to the keys and values of all ranks; any mask.

    Args:
        group: The ranks.
        device: Where their tensors are.
        shared_memory: CPU ranks of one host read straight from each other's memory; then nothing is copied that no query sees.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, shared_memory: bool = True) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.traffic = Traffic()
        self._transport = open_transport(group, device, shared_memory=shared_memory)

    @override
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, cut: SequenceCut, scale: float | None = None
    ) -> Tensor:
        check_inputs(q, k, v, cut, self.size)
        if not q.numel():
            return of_nothing(q, k, v)
        scale, size = default_scale(q.shape[-1], scale), v.shape[-1]
        q, k, v = same_head_size(q, k, v)
        # Ranks are places here: what is gathered is gathered from all of them alike.
        meeting = Meeting(mask, cut, self.rank, scale)
        out: Tensor = _Attend.apply(self, q, k, v, meeting)  # type: ignore[no-untyped-call]
        return out[..., :size]

    def gather(self, k: Tensor, v: Tensor, use: Callable[[int, Tensor, Tensor], None]) -> None:
        """Lends all ranks this one's keys and values, and uses those of all of them, its own while the others' are under way.

        Args:
            k: (B, K, s, D).
            v: (B, K, s, D).
            use: Called with each rank and its keys and values, which stay as they are until it returns.
        """
        if self.size == 1:
            use(self.rank, k, v)
            return
        buffer = self._transport.allocate(2 * k.numel(), k.dtype)
        for part, x in zip(buffer.chunk(2), (k, v), strict=True):
            part.view(x.shape).copy_(x)
        self.traffic.add("all_gather", self.size * buffer.nbytes)
        arrival = self._transport.share(buffer, _GATHER_TAG)
        use(self.rank, k, v)
        for owner, part in enumerate(arrival.wait()):
            if owner != self.rank:
                theirs = part.view(2, *k.shape)
                use(owner, theirs[0], theirs[1])
        arrival.release()

    def shares(self, like: Tensor, plan: Plan) -> Shares:
        """Room for what this rank finds, as a plan says, for the keys and values of each rank, of the shape of `like`."""
        return Shares(self._transport, self.traffic, like, plan)

    @override
    def memory(self) -> Iterable[Tensor]:
        return self._transport.memory()

    @override
    def mapped(self) -> Iterable[Tensor]:
        return self._transport.mapped()

    @override
    def close(self) -> None:
        self._transport.close()


class Shares:
    """What a rank finds for the gradients of every rank's keys and values, and the sums of what all have found for its own.

    Only rows that a plan needs are written, and only those are read.

    Args:
        transport: Between the ranks.
        traffic: Where to count.
        like: (B, K, s, D), keys or values.
        plan: Who needs whose.
    """

    def __init__(self, transport: Transport, traffic: Traffic, like: Tensor, plan: Plan) -> None:
        self._transport, self._traffic, self._like, self._plan = transport, traffic, like, plan
        self._sums = [RowSum(like.shape[2], accumulator(like.dtype)) for _ in range(2)]
        self._buffer = transport.allocate(2 * (transport.size - 1) * like.numel(), like.dtype)
        others = [rank for rank in range(transport.size) if rank != transport.rank]
        places = self._buffer.view(len(others), 2, *like.shape) if others else ()
        self._places = dict(zip(others, places, strict=True))

    def put(self, owner: int, found: tuple[Tensor, Tensor] | None) -> None:
        """What this rank has found for the keys and values of another, or of its own; ``None`` for nothing."""
        rows = self._plan.needs[owner]
        if found is None or rows is None:
            return
        if owner == self._transport.rank:
            for total, part in zip(self._sums, found, strict=True):
                total.add((0, self._like.shape[2]), part, ours=True)
        else:
            for place, part in zip(self._places[owner], found, strict=True):
                rows_of(place, rows).copy_(rows_of(part, rows))

    def sum(self) -> tuple[Tensor, Tensor]:
        """Sends it; returns the sums for this rank's own keys and values. To be called once, after all are put."""
        like, rank, size = self._like, self._transport.rank, self._transport.size
        if size > 1:
            self._traffic.add("reduce_scatter", 2 * size * like.nbytes)
            # Nobody asks for this rank's own part of the message, so any tensor of its size will do.
            arrival = self._transport.scatter(self._buffer, _SUM_TAG, own=self._buffer[: 2 * like.numel()])
            for source, part in enumerate(arrival.wait()):
                if source != rank and (rows := self._plan.serves[source]) is not None:
                    for total, theirs in zip(self._sums, part.view(2, *like.shape), strict=True):
                        total.add(rows, rows_of(theirs, rows), ours=False)
            arrival.release()
        return self._sums[0].result(like), self._sums[1].result(like)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, attention: AllGatherAttention, q: Tensor, k: Tensor, v: Tensor, meeting: Meeting
    ) -> Tensor:
        outputs = Outputs(q, meeting)
        attention.gather(k, v, outputs.add)
        out, lse = outputs.whole()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.context = attention, meeting  # type: ignore[attr-defined]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        attention, meeting = ctx.context
        backward = Backward(g, q, out, lse, meeting)
        shares = attention.shares(k, meeting.plan)
        attention.gather(k, v, lambda owner, *kv: shares.put(owner, backward.add(owner, *kv)))
        dk, dv = shares.sum()
        return None, backward.queries(), dk, dv, None

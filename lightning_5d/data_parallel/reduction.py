"""Gradient reductions under way: started during backward, finished before anyone reads a gradient."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from lightning_5d.data_parallel.buffers import BufferPool
from lightning_5d.data_parallel.transport import Arrival, Transport, sum_in_rank_order


class AllReduce:
    """Sums one flat buffer over the ranks of a transport, divided by ``divide_by``.

    Two ranks exchange whole buffers (one message each way). More of them scatter, add and share, which keeps the
    traffic of each rank at two buffers whatever their number.

    Args:
        transport: Connects the ranks.
        buffer: What this rank adds; made by the transport's ``allocate``, its size divisible by the ranks.
        tag: Keeps this sum apart from others that are under way.
        divide_by: The number of ranks, for a mean.
        deliver: Receives the flat addends (already added up, then there is one), what their sum is to be divided by, and
            this rank's own addend. It must read them before it returns.
    """

    def __init__(
        self,
        transport: Transport,
        buffer: torch.Tensor,
        tag: int,
        divide_by: float,
        deliver: Callable[[Sequence[torch.Tensor], float, torch.Tensor], None],
    ) -> None:
        self._transport, self._deliver = transport, deliver
        self._buffer: torch.Tensor | None = buffer
        self._tag, self._divide_by = tag, divide_by
        self._whole = transport.size == 2
        start = transport.share if self._whole else transport.scatter
        self._arrival: Arrival | None = start(buffer, 2 * tag)
        self._second: Arrival | None = None

    @property
    def phase(self) -> int:
        """How many phases are behind it."""
        return int(self._arrival is None) + int(self._buffer is None)

    def advance(self, block: bool) -> bool:
        """Moves forward as far as possible (``block``: to the end of this phase) and says whether it is done."""
        if self._buffer is None:
            return True
        if self._arrival is not None:
            if not (block or self._arrival.ready()):
                return False
            parts = self._arrival.wait()
            if self._whole:
                self._deliver(parts, self._divide_by, self._buffer)
                self._buffer = None  # lent until nothing refers to it
            else:
                mine = self._transport.allocate(parts[0].numel(), parts[0].dtype)
                sum_in_rank_order(parts, mine, self._divide_by)
                self._second = self._transport.share(mine, 2 * self._tag + 1)
            self._arrival.release()
            self._arrival = None
            return self._whole
        if self._second is not None:
            if not (block or self._second.ready()):
                return False
            total = torch.cat(list(self._second.wait()))
            self._deliver([total], 1.0, self._buffer)
            self._second.release()
            self._buffer = self._second = None
        return True

    def drop(self) -> None:
        """The result is of no use any more."""
        self._deliver = _forget


def allocate_padded(transport: Transport, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A buffer for an all-reduce of ``numel`` elements: a few more, zero, where the ranks do not divide them."""
    padded = -(-numel // transport.size) * transport.size
    buffer = transport.allocate(padded, dtype)
    buffer[numel:].zero_()
    return buffer


class GradientReduction:
    """One reduce-scatter over the shard group, then an all-reduce over the replicas, then ``deliver(result)``.

    Either transport may be absent (a group of one rank). With ``shard`` the buffer holds what goes to the other ranks, and
    ``own`` what stays; without it the buffer comes from ``allocate_padded``. The result is divided by ``divide_by`` and has
    the buffer's dtype; the receiver may keep it. It is ``own``, or memory of ``results``.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        own: torch.Tensor | None,
        shard: Transport | None,
        replicate: Transport | None,
        tag: int,
        divide_by: float,
        deliver: Callable[[torch.Tensor], None],
        results: BufferPool,
    ) -> None:
        self._results, self._own = results, own
        self._shard, self._replicate = shard, replicate
        self._tag, self._divide_by, self._deliver = tag, divide_by, deliver
        self._arrival: Arrival | None = None
        self._all_reduce: AllReduce | None = None
        self._result: torch.Tensor | None = None
        self._done = False
        if shard is not None:
            self._arrival = shard.scatter(buffer, tag, own)
        else:
            self._start_all_reduce(buffer)

    @property
    def phase(self) -> int:
        """How many phases are behind it."""
        scattered = int(self._shard is not None and self._arrival is None)
        return scattered + (0 if self._all_reduce is None else self._all_reduce.phase)

    def advance(self, block: bool) -> bool:
        """Moves forward by what has arrived (``block``: through the present phase) and says whether it is done."""
        if self._arrival is not None:
            if not (block or self._arrival.ready()):
                return False
            parts = self._arrival.wait()
            last = self._replicate is None
            numel, dtype = parts[0].numel(), parts[0].dtype
            # This rank's own part first, as the sum may take its place; the order is the same in every run.
            parts = sorted(parts, key=lambda part: part is not self._own)
            if self._replicate is None:
                out = parts[0] if self._own is not None else self._results.take(numel, dtype)
            else:
                out = allocate_padded(self._replicate, numel, dtype)
            sum_in_rank_order(parts, out[:numel], self._divide_by if last else 1.0)
            self._own = None
            self._arrival.release()
            self._arrival = None
            if last:
                self._result = out
            else:
                self._start_all_reduce(out)
                return False
        if self._all_reduce is not None:
            if not self._all_reduce.advance(block):
                return False
            self._all_reduce = None
        if not self._done and self._result is not None:
            self._done = True
            self._deliver(self._result)
            self._result = None
        return self._done

    def drop(self) -> None:
        """The result is of no use any more."""
        self._deliver = _forget

    def _start_all_reduce(self, buffer: torch.Tensor) -> None:
        if self._replicate is None:
            if self._divide_by != 1.0:
                sum_in_rank_order([buffer], buffer, self._divide_by)
            self._result = buffer
            return
        self._result = self._results.take(buffer.numel(), buffer.dtype)
        self._all_reduce = AllReduce(self._replicate, buffer, self._tag, self._divide_by, self._take)

    def _take(self, parts: Sequence[torch.Tensor], divide_by: float, own: torch.Tensor) -> None:
        if self._result is not None:
            sum_in_rank_order(parts, self._result, divide_by)


class Reduction(Protocol):
    """Something under way that is moved forward from time to time."""

    @property
    def phase(self) -> int:
        """How many phases are behind it; those of one queue have the same ones, on all ranks."""

    def advance(self, block: bool) -> bool:
        """Moves forward by what has arrived (``block``: through the present phase) and says whether it is done."""

    def drop(self) -> None:
        """The result is of no use any more."""


class PendingReductions:
    """The reductions of one backward, in the order in which they were started.

    They are delivered in that order, so that accumulation adds in the same order in every run. With a transport that
    can be polled at most ``in_flight`` of them normally keep their buffers; waiting for the others is bounded, because
    ranks that take different branches start them in different orders and must not wait for each other here.

    Attributes:
        in_flight: That number of reductions; may be changed at any time.
    """

    def __init__(self, in_flight: int = 3, patience_s: float = 0.2) -> None:
        self._queue: deque[Reduction] = deque()
        self.in_flight, self._usually, self._patience_s = in_flight, in_flight, patience_s
        self._patient, self._useless = True, False

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, reduction: Reduction, can_poll: bool) -> None:
        """Appends a reduction and finishes older ones that have arrived."""
        if self._useless:
            reduction.drop()
        self._queue.append(reduction)
        if not can_poll:
            return
        self._progress()
        give_up = time.monotonic() + self._patience_s
        while self._patient and len(self._queue) > self.in_flight:
            time.sleep(5e-5)
            self._progress()
            self._patient = time.monotonic() < give_up

    def restore(self) -> None:
        """Sets `in_flight` to what it was at first."""
        self.in_flight = self._usually

    def drop(self) -> None:
        """From now to the end of `finish` results are of no use. They are taken in all the same, as exchanges must be."""
        self._useless = True
        self.forget()

    def forget(self) -> None:
        """Results of what is under way now are of no use; it is taken in all the same."""
        for reduction in self._queue:
            reduction.drop()

    def finish(self) -> None:
        """Blocks until all are delivered."""
        self._patient = True
        # Phase by phase for all, so that every rank starts a phase before it waits for the next. Some may be ahead, on each rank others:
        # they are waited for only when no rank waits for what comes before.
        phase = 0
        while self._queue:
            for reduction in self._queue:
                if reduction.phase <= phase:
                    reduction.advance(block=True)
            phase += 1
            self._progress()
        self._useless = False

    def _progress(self) -> None:
        while self._queue and self._queue[0].advance(block=False):
            self._queue.popleft()


def _forget(*unused: object) -> None:
    return None

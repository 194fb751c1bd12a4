"""Rows between CPU ranks of one host, who copy them straight from each other's memory to where they belong.

A rank says how many rows it has for every expert, to all: so each knows where its rows lie in the memory of the others, and copies them
piece by piece into their final order. There is no other permutation, and nothing on the way. The numbers go along with the first rows, in one
packet: only who needs them waits for them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_5d.data_parallel.host_memory import HostMemory, Peer
from lightning_5d.data_parallel.transports import timeout_s_of
from lightning_5d.expert_parallel.exchange import Routes, TokenExchange, check_divides, check_same
from lightning_5d.tensor_parallel.axis import Arriving

_COUNTS, _ROWS = 0, 1

Pieces = Sequence[tuple[int, int, int]]
"""What a rank reads, in order: of which rank, from which row, how many."""


class HostRoutes(Routes):
    """Routes that know those of all other ranks, too, once they are needed.

    Args:
        rank: This rank.
        ranks: How many there are.
        own: Its rows for each expert.
        others: Waits for those of all ranks.
    """

    def __init__(self, rank: int, ranks: int, own: list[int], others: Callable[[], list[list[int]]]) -> None:
        self._rank, self._ranks, self._own, self._others = rank, ranks, own, others

    @cached_property
    def all_QE(self) -> list[list[int]]:
        """Rows of rank q for each of all experts."""
        return self._others()

    @property
    @override
    def sent_RM(self) -> Tensor:
        return torch.tensor(self._own).view(self._ranks, -1)

    @property
    @override
    def received_RM(self) -> Tensor:
        here = self._experts_of(self._rank)
        return torch.tensor([each[here] for each in self.all_QE])

    @cached_property
    @override
    def received_M(self) -> Tensor:
        here = self._experts_of(self._rank)
        return torch.tensor([sum(counts_Q) for counts_Q in zip(*(each[here] for each in self.all_QE), strict=True)])

    @cached_property
    def there_R(self) -> list[int]:
        """This rank's rows for the experts of each rank."""
        return [sum(self._own[self._experts_of(rank)]) for rank in range(self._ranks)]

    @cached_property
    def received_R(self) -> list[int]:
        """Rows of each rank for the experts of this one."""
        here = self._experts_of(self._rank)
        return [sum(each[here]) for each in self.all_QE]

    @cached_property
    def at_home_R(self) -> list[int]:
        """Rows that each rank sends."""
        return [sum(each) for each in self.all_QE]

    @cached_property
    def at_experts_R(self) -> list[int]:
        """Rows that come to each rank's experts."""
        return [sum(sum(each[self._experts_of(rank)]) for each in self.all_QE) for rank in range(self._ranks)]

    @cached_property
    def dispatched(self) -> Pieces:
        """Where the rows for this rank's experts lie in the memory of each rank: there by expert, of all experts."""
        starts = [list(accumulate(each, initial=0)) for each in self.all_QE]
        here = self._experts_of(self._rank)
        return [
            (owner, starts[owner][expert], each[expert])
            for expert in range(here.start, here.stop)
            for owner, each in enumerate(self.all_QE)
            if each[expert]
        ]

    @cached_property
    def returned(self) -> Pieces:
        """Where the rows of this rank lie in the memory of each rank: there by expert of that rank, and then by the rank they come from."""
        pieces = []
        for owner in range(self._ranks):
            start = 0
            for counts_Q in zip(*(each[self._experts_of(owner)] for each in self.all_QE), strict=True):
                if own := counts_Q[self._rank]:
                    pieces.append((owner, start + sum(counts_Q[: self._rank]), own))
                start += sum(counts_Q)
        return pieces

    def _experts_of(self, rank: int) -> slice:
        each = len(self._own) // self._ranks
        return slice(rank * each, (rank + 1) * each)


class HostTokenExchange(TokenExchange):
    """The exchange on shared memory. Made by `connect`.

    Args:
        group: The ranks.
        host: Their memory.
    """

    def __init__(self, group: dist.ProcessGroup, host: HostMemory) -> None:
        super().__init__(group)
        self._host = host
        self._peers = tuple(host.peers.values())
        self._numbers = [0, 0]

    @classmethod
    def connect(cls, group: dist.ProcessGroup) -> HostTokenExchange | None:
        """Connects all ranks of a group, or returns ``None`` on all of them if one cannot reach another this way."""
        host = HostMemory.connect(group, timeout_s_of(group), "expert group")
        return None if host is None else cls(group, host)

    @override
    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        if like.device.type != "cpu" or not math.prod(shape):
            return super().empty(shape, like)
        # Numbers of rows are others every time; with a few sizes of memory, each serves many of them.
        numel = math.prod(shape)
        buffer = self._host.allocate(_rounded(numel), like.dtype, self._peers)
        return buffer[:numel].view(tuple(shape))

    @override
    def routes(self, counts_E: Tensor, row_bytes: int, layer: int = 0) -> HostRoutes:
        check_divides(self.size, len(counts_E))
        counts: list[int] = counts_E.tolist()
        number = self._number(_COUNTS)
        said = (*counts, row_bytes, layer)
        self._host.say(struct.pack(f"<{len(said)}q", *said), _COUNTS, number, self._peers)
        return HostRoutes(self.rank, self.size, counts, lambda: self._numbers_of_all(said, number))

    def _numbers_of_all(self, own: Sequence[int], number: int) -> list[list[int]]:
        # Nothing, where rows have gone out since.
        self._host.tell(self._peers)
        each: dict[int, Sequence[int]] = {
            peer.rank: _integers(self._host.await_said(peer, _COUNTS, number)) for peer in self._peers
        }
        each[self.rank] = own
        all_Q = [each[rank] for rank in range(self.size)]
        check_same("experts", [len(numbers) - 2 for numbers in all_Q], self.rank)
        self.check_said([numbers[-2] for numbers in all_Q], [numbers[-1] for numbers in all_Q])
        return [list(numbers[:-2]) for numbers in all_Q]

    @override
    def start_dispatch(self, rows_SD: Tensor, routes: Routes) -> Arriving:
        known = _known(routes)
        return self._start(rows_SD, known.there_R, lambda: (known.at_home_R, known.dispatched))

    @override
    def start_return(self, rows_SD: Tensor, routes: Routes) -> Arriving:
        known = _known(routes)
        return self._start(rows_SD, known.received_R, lambda: (known.at_experts_R, known.returned))

    @override
    def memory(self) -> list[Tensor]:
        return self._host.memory()

    @override
    def mapped(self) -> list[Tensor]:
        return self._host.mapped()

    @override
    def close(self) -> None:
        self._host.close()

    def _start(
        self, rows: Tensor, readers_R: Sequence[int], sources: Callable[[], tuple[Sequence[int], Pieces]]
    ) -> Arriving:
        """Lets others read rows.

        Args:
            rows: The rows of this rank.
            readers_R: How many of them each rank reads.
            sources: How many each rank has, and what this one reads of them.
        """
        rows = rows.detach().contiguous()
        self.traffic.add("all_to_all", rows.nbytes)
        number = self._number(_ROWS)
        readers = tuple(peer for peer in self._peers if readers_R[peer.rank])
        if readers:
            if not self._host.is_ready(rows, self._peers):
                rows = self.empty(rows.shape, rows).copy_(rows)
            self._host.publish(rows.view(-1), _ROWS, number, self._peers, readers=readers)
        if len(readers) < len(self._peers):
            # Who gets no rows waits for that number all the same.
            self._host.tell(self._peers)
        return _Rows(self, number, rows, sources)

    def _number(self, tag: int) -> int:
        number = self._numbers[tag]
        self._numbers[tag] += 1
        return number

    def read(self, number: int, owner: int, rows: int, like: Tensor) -> tuple[Tensor, Peer, int]:
        """Waits for the rows of another rank; returns them, it, and the block that it is to be told to be `done`."""
        peer = self._host.peers[owner]
        block, nbytes = self._host.await_ready(peer, _ROWS, number)
        expected = rows * like.shape[1] * like.itemsize
        if nbytes != expected:
            raise RuntimeError(
                f"Rank {owner} of the expert group sent {nbytes} bytes where rank {self.rank} waits for {expected}: its ranks have to"
                " compute with experts in one order."
            )
        return peer.blocks[block].view()[:nbytes].view(like.dtype).view(rows, like.shape[1]), peer, block

    def done(self, peer: Peer, block: int) -> None:
        """Lets a rank have its memory back: soon, with what is sent next."""
        self._host.done(peer, block, at_once=False)


class _Rows(Arriving):
    def __init__(
        self,
        exchange: HostTokenExchange,
        number: int,
        own: Tensor,
        sources: Callable[[], tuple[Sequence[int], Pieces]],
    ) -> None:
        self._exchange, self._number, self._sources = exchange, number, sources
        self._own: Tensor | None = own

    def wait(self) -> Tensor:
        """See `Arriving.wait`."""
        own = self._own
        if own is None:
            raise RuntimeError("What has arrived is waited for once.")
        rows_R, pieces = self._sources()
        lie = {self._exchange.rank: own}
        taken: list[tuple[Peer, int]] = []
        for owner in sorted({owner for owner, _, _ in pieces} - {self._exchange.rank}):
            lie[owner], peer, block = self._exchange.read(self._number, owner, rows_R[owner], own)
            taken.append((peer, block))
        out = own.new_empty((sum(length for _, _, length in pieces), own.shape[1]))
        if pieces:
            torch.cat([lie[owner].narrow(0, start, length) for owner, start, length in pieces], out=out)
        for peer, block in taken:
            self._exchange.done(peer, block)
        self._own = None
        return out


def _known(routes: Routes) -> HostRoutes:
    if not isinstance(routes, HostRoutes):
        raise TypeError("Routes of another exchange.")
    return routes


def _integers(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 8}q", data)


def _rounded(numel: int) -> int:
    """The next of four sizes between two powers of two."""
    step = 1 << max(numel.bit_length() - 3, 0)
    return -(-numel // step) * step

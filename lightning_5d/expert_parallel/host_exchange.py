"""Rows between CPU ranks of one host, who copy them straight from each other's memory to where they belong.

A rank says how many rows it has for every expert, to all: so each knows where its rows lie in the memory of the others, and copies them
piece by piece into their final order. There is no other permutation, and nothing on the way. The numbers go along with the first rows, in one
packet: only who needs them waits for them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_5d.data_parallel.host_memory import HostMemory, Peer
from lightning_5d.data_parallel.transports import timeout_s_of
from lightning_5d.expert_parallel.exchange import Routes, TokenExchange, check_divides, check_same
from lightning_5d.tensor_parallel.axis import Arriving

_COUNTS, _ROWS = 0, 1


@dataclass(frozen=True)
class Reading:
    """What a rank reads of the rows of others, and of its own.

    Attributes:
        rows_R: How many rows each rank has there.
        pieces_R: Into how long pieces these are cut.
        taken: Which of the pieces it reads.
        by_rank: All of one rank come before those of the next one. Else the first piece of each, then the second ones.
    """

    rows_R: Sequence[int]
    pieces_R: Sequence[Sequence[int]]
    taken: slice
    by_rank: bool

    @cached_property
    def owners(self) -> Sequence[int]:
        """The ranks of which it reads any row."""
        return [rank for rank, pieces in enumerate(self.pieces_R) if any(pieces[self.taken])]

    def put_together(self, lie: Sequence[Tensor]) -> Tensor:
        """Copies the rows of all `owners` into their order."""
        pieces = (self.pieces_R[owner] for owner in self.owners)
        parts = [torch.split_with_sizes(rows, each)[self.taken] for rows, each in zip(lie, pieces, strict=True)]
        return torch.cat(list(chain(*parts) if self.by_rank else chain(*zip(*parts, strict=True))))


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
    def dispatched(self) -> Reading:
        """The rows for this rank's experts in the memory of each rank: there by expert, of all experts."""
        here = self._experts_of(self._rank)
        pieces = [[sum(each[: here.start]), *each[here], sum(each[here.stop :])] for each in self.all_QE]
        return Reading([sum(each) for each in self.all_QE], pieces, slice(1, -1), by_rank=False)

    @cached_property
    def returned(self) -> Reading:
        """The rows of this rank in the memory of each rank: there by expert of that rank, and then by the rank they come from."""
        rows, pieces = [], []
        for owner in range(self._ranks):
            # What comes before this rank's of an expert, and these.
            sizes, before = [], 0
            for counts_Q in zip(*(each[self._experts_of(owner)] for each in self.all_QE), strict=True):
                sizes += [before + sum(counts_Q[: self._rank]), counts_Q[self._rank]]
                before = sum(counts_Q[self._rank + 1 :])
            pieces.append([*sizes, before])
            rows.append(sum(sizes) + before)
        return Reading(rows, pieces, slice(1, None, 2), by_rank=True)

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
        numel = math.prod(shape)
        if like.device.type != "cpu" or not numel:
            return super().empty(shape, like)
        # Numbers of rows are others every time; with a few sizes of memory, each serves many of them.
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
        return self._start(rows_SD, known.there_R, lambda: known.dispatched)

    @override
    def start_return(self, rows_SD: Tensor, routes: Routes) -> Arriving:
        known = _known(routes)
        return self._start(rows_SD, known.received_R, lambda: known.returned)

    @override
    def memory(self) -> list[Tensor]:
        return self._host.memory()

    @override
    def mapped(self) -> list[Tensor]:
        return self._host.mapped()

    @override
    def close(self) -> None:
        self._host.close()

    def _start(self, rows: Tensor, readers_R: Sequence[int], reading: Callable[[], Reading]) -> Arriving:
        """Lets others read rows.

        Args:
            rows: The rows of this rank.
            readers_R: How many of them each rank reads.
            reading: What this one reads of them.
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
        return _Rows(self, number, rows, reading)

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
        return peer.blocks[block].view(rows * like.shape[1], like.dtype).view(rows, like.shape[1]), peer, block

    def done(self, peer: Peer, block: int) -> None:
        """Lets a rank have its memory back: soon, with what is sent next."""
        self._host.done(peer, block, at_once=False)


class _Rows(Arriving):
    def __init__(
        self,
        exchange: HostTokenExchange,
        number: int,
        own: Tensor,
        reading: Callable[[], Reading],
    ) -> None:
        self._exchange, self._number, self._reading = exchange, number, reading
        self._own: Tensor | None = own

    def wait(self) -> Tensor:
        """See `Arriving.wait`."""
        own = self._own
        if own is None:
            raise RuntimeError("What has arrived is waited for once.")
        reading = self._reading()
        lie: list[Tensor] = []
        taken: list[tuple[Peer, int]] = []
        for owner in reading.owners:
            if owner == self._exchange.rank:
                lie.append(own)
                continue
            rows, peer, block = self._exchange.read(self._number, owner, reading.rows_R[owner], own)
            lie.append(rows)
            taken.append((peer, block))
        out = reading.put_together(lie) if lie else own.new_empty((0, own.shape[1]))
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

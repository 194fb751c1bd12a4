"""Rows between CPU ranks of one host, who copy them straight from each other's memory to where they belong.

A rank says how many rows it has for every expert, to all: so each knows where its rows lie in the memory of the others, and copies them
piece by piece into their final order. There is no other permutation, and nothing on the way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
class HostRoutes(Routes):
    """Routes that know those of all other ranks, too.

    Attributes:
        all_QRM: Rows of rank q for expert m of rank r.
    """

    all_QRM: Tensor


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
        experts = len(counts_E)
        check_divides(self.size, experts)
        shared = self._host.allocate(experts + 2, torch.int64, self._peers)
        shared[:-2] = counts_E
        shared[-2], shared[-1] = row_bytes, layer
        number = self._number(_COUNTS)
        self._host.publish(shared, _COUNTS, number, self._peers)
        each = torch.empty((self.size, experts + 2), dtype=torch.int64)
        each[self.rank] = shared
        taken: list[tuple[Peer, int]] = []
        sizes = [experts] * self.size
        for peer in self._peers:
            block, nbytes = self._host.await_ready(peer, _COUNTS, number)
            taken.append((peer, block))
            sizes[peer.rank] = nbytes // shared.itemsize - 2
            if sizes[peer.rank] == experts:
                each[peer.rank] = peer.blocks[block].view()[:nbytes].view(torch.int64)
        for peer, block in taken:
            self._host.done(peer, block)
        check_same("experts", sizes, self.rank)
        self.check_said(each[:, -2].tolist(), each[:, -1].tolist())
        all_QRM = each[:, :-2].view(self.size, self.size, -1)
        return HostRoutes(all_QRM[self.rank], all_QRM[:, self.rank], all_QRM)

    @override
    def start_dispatch(self, rows_SD: Tensor, routes: Routes) -> Arriving:
        table = _all(routes)
        # Where the pieces for this rank lie in the memory of each rank.
        starts = _starts(table.flatten(1)).view(table.shape)[:, self.rank]
        pieces = [
            (owner, start, start + length)
            for by_owner, lengths in zip(starts.t().tolist(), table[:, self.rank].t().tolist(), strict=True)
            for owner, (start, length) in enumerate(zip(by_owner, lengths, strict=True))
            if length
        ]
        return self._start(rows_SD, table.sum(2)[self.rank], table.sum((1, 2)), pieces)

    @override
    def start_return(self, rows_SD: Tensor, routes: Routes) -> Arriving:
        table = _all(routes)
        # (R, M, Q): where experts are, rows lie by expert and then by the rank they have come from.
        where = table.permute(1, 2, 0)
        starts = _starts(where.flatten(1)).view(where.shape)[:, :, self.rank]
        pieces = [
            (owner, start, start + length)
            for owner, (by_expert, lengths) in enumerate(zip(starts.tolist(), table[self.rank].tolist(), strict=True))
            for start, length in zip(by_expert, lengths, strict=True)
            if length
        ]
        return self._start(rows_SD, table.sum(2)[:, self.rank], table.sum((0, 2)), pieces)

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
        self, rows: Tensor, readers_R: Tensor, rows_R: Tensor, pieces: Sequence[tuple[int, int, int]]
    ) -> Arriving:
        """Lets others read rows.

        Args:
            rows: The rows of this rank.
            readers_R: How many of them each rank reads.
            rows_R: How many each rank has.
            pieces: What this rank reads, in order: of which rank, from where to where.
        """
        rows = rows.detach().contiguous()
        self.traffic.add("all_to_all", rows.nbytes)
        number = self._number(_ROWS)
        readers = tuple(peer for peer in self._peers if readers_R[peer.rank])
        if readers:
            if not self._host.is_ready(rows, self._peers):
                rows = self.empty(rows.shape, rows).copy_(rows)
            self._host.publish(rows.view(-1), _ROWS, number, self._peers, readers=readers)
        return _Rows(self, number, rows, rows_R.tolist(), pieces)

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
        """Lets a rank have its memory back."""
        self._host.done(peer, block)


class _Rows(Arriving):
    def __init__(
        self,
        exchange: HostTokenExchange,
        number: int,
        own: Tensor,
        rows_R: Sequence[int],
        pieces: Sequence[tuple[int, int, int]],
    ) -> None:
        self._exchange, self._number, self._rows_R, self._pieces = exchange, number, rows_R, pieces
        self._own: Tensor | None = own

    def wait(self) -> Tensor:
        """See `Arriving.wait`."""
        own = self._own
        if own is None:
            raise RuntimeError("What has arrived is waited for once.")
        sources = {self._exchange.rank: own}
        taken: list[tuple[Peer, int]] = []
        for owner in sorted({owner for owner, _, _ in self._pieces} - {self._exchange.rank}):
            rows, peer, block = self._exchange.read(self._number, owner, self._rows_R[owner], own)
            sources[owner] = rows
            taken.append((peer, block))
        total = sum(stop - start for _, start, stop in self._pieces)
        out = own.new_empty((total, own.shape[1]))
        if self._pieces:
            torch.cat([sources[owner][start:stop] for owner, start, stop in self._pieces], out=out)
        for peer, block in taken:
            self._exchange.done(peer, block)
        self._own = None
        return out


def _all(routes: Routes) -> Tensor:
    if not isinstance(routes, HostRoutes):
        raise TypeError("Routes of another exchange.")
    return routes.all_QRM


def _starts(lengths: Tensor) -> Tensor:
    """Where pieces of these lengths start that lie one after the other."""
    return lengths.cumsum(-1) - lengths


def _rounded(numel: int) -> int:
    """The next of four sizes between two powers of two."""
    step = 1 << max(numel.bit_length() - 3, 0)
    return -(-numel // step) * step

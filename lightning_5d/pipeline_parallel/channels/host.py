"""Messages through memory that ranks of one host share."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_5d.data_parallel.host_memory import HostMemory
from lightning_5d.pipeline_parallel.channels.channels import Arriving, Channels
from lightning_5d.pipeline_parallel.channels.message import Layout, Shape

_TAG = 0


class HostChannels(Channels):
    """The sender copies a message into shared memory once, and the receiver computes with it right there.

    The memory is used for another message when the receiver's last tensor in it is gone.

    Args:
        host: The memory, and the connections to the other ranks.
    """

    def __init__(self, host: HostMemory) -> None:
        self._host = host
        self._sent: Counter[int] = Counter()
        self._expected: Counter[int] = Counter()

    @override
    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        layout = Layout.of([(tensor.shape, tensor.dtype) for tensor in tensors])
        if not layout.nbytes:
            return
        memory = self._host.allocate(layout.nbytes, torch.uint8, (self._host.peers[to],))
        layout.pack([tensor.detach() for tensor in tensors], memory)
        self._publish(memory, to)

    @override
    def receive(self, shapes: Sequence[Shape], source: int) -> Arriving:
        layout = Layout.of(shapes)
        return _Shared(self, layout, source, self._next(source) if layout.nbytes else None)

    @override
    def send_object(self, value: Any, to: int) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self._publish(self._host.allocate(len(data), torch.uint8, (self._host.peers[to],)).copy_(data), to)

    @override
    def receive_object(self, source: int) -> Any:
        return pickle.loads(self.take(source, self._next(source)).numpy())  # type: ignore[arg-type]

    @override
    def finish(self) -> None:
        self._host.receive(0.0)
        self._host.settle(self._host.peers.values())

    @override
    def close(self) -> None:
        self._host.close()

    @override
    def memory(self) -> list[Tensor]:
        return self._host.memory()

    @override
    def mapped(self) -> list[Tensor]:
        return self._host.mapped()

    def take(self, source: int, number: int) -> Tensor:
        """Waits for a message of a rank; returns its bytes, where they are."""
        return self._host.borrow(self._host.peers[source], _TAG, number)

    def _publish(self, memory: Tensor, to: int) -> None:
        number, self._sent[to] = self._sent[to], self._sent[to] + 1
        self._host.publish(memory, _TAG, number, (self._host.peers[to],), at_once=False)
        # Others are told what has been read here meanwhile, so that they need no more memory than they must.
        self._host.receive(0.0)

    def _next(self, source: int) -> int:
        number, self._expected[source] = self._expected[source], self._expected[source] + 1
        return number


class _Shared(Arriving):
    def __init__(self, channels: HostChannels, layout: Layout, source: int, number: int | None) -> None:
        self._channels, self._layout, self._source, self._number = channels, layout, source, number

    @override
    def wait(self) -> list[Tensor]:
        if self._number is None:
            return self._layout.unpack(torch.empty(0, dtype=torch.uint8))
        memory = self._channels.take(self._source, self._number)
        if memory.numel() != self._layout.nbytes:
            raise RuntimeError(
                f"Rank {self._source} of the pipeline sent {memory.numel()} bytes where {self._layout.nbytes} were expected. Do all"
                " ranks take the same steps, with batches of the same shapes?"
            )
        return self._layout.unpack(memory)

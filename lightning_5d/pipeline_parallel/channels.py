"""Point-to-point messages between stages on `torch.distributed`."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_5d.mesh import ParallelMesh


class Arriving:
    """A message that is on its way."""

    def __init__(self, tensors: list[Tensor], works: list[Any]) -> None:
        self._tensors, self._works = tensors, works

    def wait(self) -> list[Tensor]:
        """Its tensors, when they are there."""
        for work in self._works:
            work.wait()
        return self._tensors


class Channels:
    """Messages between the stages of one pipeline, in order between any two ranks."""

    def __init__(self, ranks: list[int], rank: int, up: Any, down: Any, device: torch.device) -> None:
        self._ranks, self._rank, self._up, self._down, self._device = ranks, rank, up, down, device
        self._out: deque[tuple[Any, Tensor]] = deque()

    @classmethod
    def open(cls, mesh: ParallelMesh, device: torch.device, timeout: timedelta) -> Channels:
        """Opens them; all ranks of the world call it."""
        if mesh.size("pp") == 1:
            return cls([0], 0, None, None, device)
        ranks = dist.get_process_group_ranks(mesh.group("pp"))
        lines: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(lines, ranks)
        groups = {}
        for line in sorted({tuple(line) for line in lines}):
            groups[line] = dist.new_group(list(line), timeout=timeout), dist.new_group(list(line), timeout=timeout)
        up, down = groups[tuple(ranks)]
        return cls(ranks, mesh.rank("pp"), up, down, device)

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        """Sends tensors, and does not wait."""
        while self._out and self._out[0][0].is_completed():
            self._out.popleft()
        group = self._up if to > self._rank else self._down
        for tensor in tensors:
            tensor = tensor.contiguous()
            self._out.append((dist.isend(tensor, self._ranks[to], group=group), tensor))

    def receive(self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], source: int) -> Arriving:
        """Expects the next message of a rank."""
        group = self._up if source < self._rank else self._down
        tensors = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in shapes]
        return Arriving(tensors, [dist.irecv(tensor, self._ranks[source], group=group) for tensor in tensors])

    def send_object(self, obj: Any, to: int) -> None:
        """Sends any object."""
        data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        self.send([torch.tensor([data.numel()]), data], to)

    def receive_object(self, source: int) -> Any:
        """Waits for an object."""
        (size,) = self.receive([((1,), torch.int64)], source).wait()
        (data,) = self.receive([((int(size),), torch.uint8)], source).wait()
        return pickle.loads(data.numpy().tobytes())

    def finish(self) -> None:
        """Waits until everything has left."""
        while self._out:
            work, _ = self._out.popleft()
            work.wait()

    def close(self) -> None:
        """Gives everything back."""

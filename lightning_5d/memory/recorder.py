"""Records one rank: told where phases begin and who holds what, it makes a `MemoryRecord`. Knows no Lightning."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_5d.memory.allocator import Allocator
from lightning_5d.memory.categories import GRADIENTS
from lightning_5d.memory.record import MemoryRecord
from lightning_5d.memory.storages import StorageLog
from lightning_5d.memory.timeline import Segment, Timeline

Held = Iterable[tuple[str, Tensor]]


class MemoryRecorder:
    """Recording is on from construction until `stop`.

    Args:
        device: Whose memory to count.
        held: Gives every tensor somebody answers for, with its category.
        pools: Gives the memory that exchanges keep for reuse, bytes by address.
        elsewhere: Gives the memory of other ranks that is read in place, bytes by address.
        rank, world_size: As in `MemoryRecord`.
        resolution: See `Timeline`.
        snapshot: See `Allocator`.
    """

    def __init__(
        self,
        device: torch.device,
        held: Callable[[], Held],
        pools: Callable[[], dict[int, int]] = dict,
        elsewhere: Callable[[], dict[int, int]] = dict,
        *,
        rank: int = 0,
        world_size: int = 1,
        resolution: int = 48,
        snapshot: bool = False,
    ) -> None:
        self.record = MemoryRecord(rank, world_size, device.type)
        self.allocator = Allocator(device, snapshot)
        self._held, self._pools, self._elsewhere = held, pools, elsewhere
        self._zero_s = time.perf_counter()
        self._timeline = Timeline(self._zero_s, resolution)
        self._segments: list[Segment] = []
        self._hooks: dict[int, tuple[Tensor, RemovableHandle]] = {}
        self._log = StorageLog(device.type)
        self._timeline.start(pools())
        self._log.start()
        self._recording, self._removed = True, False

    @property
    def removed(self) -> bool:
        """Whether nothing is installed any more."""
        return self._removed

    @property
    def recording(self) -> bool:
        """Whether anything is still written down."""
        return self._recording

    def begin(self, phase: str, step: int, batch: int) -> None:
        """A phase begins, and the one before it ends. The same one again changes nothing."""
        last = self._segments[-1] if self._segments else None
        if not self._recording or (last and (last.name, last.step, last.batch) == (phase, step, batch)):
            return
        self._end_segment()
        number = len(self.record.phases) + len(self._segments)
        self._segments.append(Segment(number, phase, step, batch, time.perf_counter()))
        self._log.phase = number
        self.allocator.begin_phase()

    def claim(self) -> None:
        """Notes who holds what right now. What is unreachable later (a gradient before its reduction) is found so."""
        if self._recording:
            with self._log.aside():
                for category, tensor in self._held():
                    self._log.claim(tensor, category)

    def watch_gradients(self) -> None:
        """From now on notes the gradients of parameters that exist, at the moment when backward sets them."""
        if not self._recording:
            return
        for _, tensor in self._held():
            if tensor.requires_grad and tensor.is_leaf and id(tensor) not in self._hooks:
                handle = tensor.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
                self._hooks[id(tensor)] = (tensor, handle)

    def digest(self) -> None:
        """Turns what has happened so far into phases and points of `record`."""
        if not self._recording or not self._segments:
            return
        self.claim()
        self._end_segment()
        with self._log.aside():
            pools = self._pools()
            phases, points = self._timeline.add(self._segments, self._log.take(), pools, self._elsewhere())
            self.record.phases += phases
            self.record.points += points
        self._segments = []

    def stop(self) -> None:
        """Digests, and removes everything that was installed; call it again while `removed` says that something is left."""
        if self._recording:
            self.digest()
            self._recording = False
            for _, handle in self._hooks.values():
                handle.remove()
            self._hooks.clear()
        self._removed = self._log.stop()

    def _end_segment(self) -> None:
        if self._segments:
            self._segments[-1].end_s = time.perf_counter()
            self._segments[-1].allocator = self.allocator.statistics()

    def _on_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._log.claim(parameter.grad, GRADIENTS)

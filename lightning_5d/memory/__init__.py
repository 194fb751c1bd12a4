"""Bytes of a training step by who holds them: recording, files and charts. The callback is `MemoryProfiler`."""

from lightning_5d.memory.record import MemoryRecord
from lightning_5d.memory.recorder import MemoryRecorder

__all__ = ["MemoryRecord", "MemoryRecorder"]

"""What a device's caching allocator says about itself, where there is one (CUDA)."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from lightning_5d.memory.record import write

# Enough for the allocations of a few large steps; older ones are dropped.
_HISTORY = 200_000


class Allocator:
    """Statistics by phase and a snapshot for https://docs.pytorch.org/memory_viz; does nothing where there is no CUDA.

    Asking for the highest within a phase resets torch's own peak statistics of the device while recording.

    Args:
        device: The device of this rank.
        snapshot: Also keep the history of allocations, from now on.
    """

    def __init__(self, device: torch.device, snapshot: bool) -> None:
        self._device = device if device.type == "cuda" else None
        self._snapshot = snapshot and self._device is not None
        if self._device is not None:
            torch.cuda.init()  # type: ignore[no-untyped-call]  # statistics cannot be reset before
        if self._snapshot:
            # Private names, the documented way to a snapshot (checked with torch 2.13).
            torch.cuda.memory._record_memory_history(max_entries=_HISTORY)

    def begin_phase(self) -> None:
        """Starts looking for the highest value anew."""
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    def statistics(self) -> dict[str, int] | None:
        """Bytes allocated and reserved now, and the most allocated since `begin_phase`."""
        if self._device is None:
            return None
        return {
            "allocated": torch.cuda.memory_allocated(self._device),
            "reserved": torch.cuda.memory_reserved(self._device),
            "peak_allocated": torch.cuda.max_memory_allocated(self._device),
        }

    def save(self, path: Path) -> Path | None:
        """Writes the history as a pickle, and ends it; returns the path, None where there is no history."""
        if not self._snapshot:
            return None
        snapshot = torch.cuda.memory._snapshot(self._device)
        torch.cuda.memory._record_memory_history(enabled=None)
        self._snapshot = False
        write(path, pickle.dumps(snapshot))
        return path

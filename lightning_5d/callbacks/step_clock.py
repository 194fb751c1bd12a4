"""When the parts of a step happened, and what was in its batch; nothing here waits for an accelerator until it is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class Moment:
    """A point in time on the host, and in the work that an accelerator has been given.

    Args:
        device: The device that works.
    """

    def __init__(self, device: torch.device) -> None:
        self.host = perf_counter()
        self._event: torch.Event | None = None
        if device.type not in ("cpu", "meta"):
            self._event = torch.Event(device, enable_timing=True)
            self._event.record()

    def seconds_since(self, earlier: Moment) -> float:
        """Seconds between two moments of the device's work; the device must have come past both."""
        if self._event is None or earlier._event is None:
            return self.host - earlier.host
        return float(earlier._event.elapsed_time(self._event)) / 1000


@dataclass
class TrainedBatch:
    """One batch, from the end of the one before to its own.

    Attributes:
        before: The end of the batch before; ``None`` for a first one.
        start: When it had come.
        ready: When gradients were complete; ``None`` where no optimizer stepped.
        end: When everything was done.
        stepped: Whether an optimizer stepped.
        samples: Samples of this rank.
        tokens: Tokens of this rank; a tensor until somebody needs the number.
        flops: Floating-point operations of this rank's model; ``None`` if not known.
    """

    before: Moment | None
    start: Moment
    ready: Moment | None
    end: Moment
    stepped: bool
    samples: int
    tokens: int | Tensor
    flops: float | None

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.end.seconds_since(self.before or self.start)

    @property
    def data_seconds(self) -> float:
        """Between batches, by the host's clock."""
        return self.start.host - self.before.host if self.before is not None else 0.0

    @property
    def forward_backward_seconds(self) -> float:
        """Until gradients are complete."""
        return (self.ready or self.end).seconds_since(self.start)

    @property
    def optimizer_seconds(self) -> float:
        """After that."""
        return self.end.seconds_since(self.ready) if self.ready is not None else 0.0


def samples_and_tokens(batch: Any, key: str, mask: str) -> tuple[int, int | Tensor]:
    """How much is in a batch.

    Args:
        batch: What the loader gave.
        key: The entry with the tokens, of shape (B, T); in a batch without names the first tensor of integers.
        mask: The entry of the same shape that is zero where there is padding.

    Returns:
        Samples, and tokens, 0 of them where there are none; a tensor where it takes a reduction on the device.
    """
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    found = batch.get(key) if isinstance(batch, Mapping) else None
    if not isinstance(batch, Mapping):
        found = next((t for t in tensors if t.ndim >= 2 and not t.is_floating_point() and t.dtype != torch.bool), None)
    if not isinstance(found, Tensor):
        return (len(tensors[0]) if tensors else 0), 0
    hidden = batch.get(mask) if isinstance(batch, Mapping) else None
    if isinstance(hidden, Tensor) and hidden.shape == found.shape:
        return len(found), (hidden != 0).sum()
    return len(found), found.numel()


def shapes(batch: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of all tensors of a batch."""
    return tuple(tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))

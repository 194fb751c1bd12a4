"""Several tensors as one piece of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

Shape = tuple[Sequence[int], torch.dtype]
"""Shape and dtype of one tensor."""

_ALIGNED = 64  # bytes: what kernels like, and a multiple of every item size


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a message lie.

    Attributes:
        shapes: Their shapes and dtypes.
        offsets: Bytes before each.
        strides: Of each, when it has arrived.
        nbytes: Of the whole message.
    """

    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    offsets: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    nbytes: int

    @classmethod
    def of(cls, shapes: Sequence[Shape]) -> Layout:
        """The layout of tensors with these shapes."""
        return _layout(tuple((tuple(shape), dtype) for shape, dtype in shapes))

    def pack(self, tensors: Sequence[Tensor], memory: Tensor) -> None:
        """Copies tensors into a flat tensor of bytes."""
        for tensor, place in zip(tensors, self.unpack(memory), strict=True):
            place.copy_(tensor)

    def unpack(self, memory: Tensor) -> list[Tensor]:
        """The tensors inside of a flat tensor of bytes; all of them keep it alive.

        They are no views of each other: one that is written to does not count as a change of the others.
        """
        storage, start = memory.untyped_storage(), memory.storage_offset()
        return [
            torch.empty(0, dtype=dtype, device=memory.device).set_(
                storage, (start + offset) // dtype.itemsize, shape, strides
            )
            for (shape, dtype), offset, strides in zip(self.shapes, self.offsets, self.strides, strict=True)
        ]


@lru_cache(maxsize=1024)
def _layout(shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]) -> Layout:
    offsets, strides, end = [], [], 0
    for shape, dtype in shapes:
        offsets.append(end)
        strides.append(torch.empty(shape, device="meta").stride())
        end += -(-math.prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED
    return Layout(shapes, tuple(offsets), tuple(strides), end)

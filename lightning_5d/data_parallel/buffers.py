"""Large buffers that come back by themselves: fresh pages cost more than the copy they are needed for."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import Any

import torch

_PAGE = mmap.PAGESIZE


class Buffer:
    """A piece of memory that is lent out as tensors.

    It counts as lent until the last tensor made from one loan is gone, whoever holds it: a gradient that a callback
    keeps for later keeps its memory.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self.nbytes = memory, len(memory)
        self._loan: weakref.ref[Any] | None = None

    @property
    def lent(self) -> bool:
        """Whether a tensor of the last loan is still there."""
        return self._loan is not None and self._loan() is not None

    def lend(self, numel: int = -1, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """The first elements of the memory; all of it by default."""
        loan = (ctypes.c_char * self.nbytes).from_buffer(self._memory)
        self._loan = weakref.ref(loan)
        return _elements(loan, numel, dtype)

    def view(self, numel: int = -1, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """The same, to look at; does not count as lent."""
        return _elements(self._memory, numel, dtype)


class BufferPool:
    """Private memory for results that are made anew in every step, such as sharded gradients."""

    def __init__(self) -> None:
        self._by_size: dict[int, list[Buffer]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised flat tensor; its memory is used again once no tensor refers to it."""
        size = in_pages(numel * dtype.itemsize)
        buffers = self._by_size.setdefault(size, [])
        buffer = next((buffer for buffer in buffers if not buffer.lent), None)
        if buffer is None:
            buffer = Buffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            buffers.append(buffer)
        return buffer.lend(numel, dtype)

    def views(self) -> list[torch.Tensor]:
        """All of its memory, lent or not, one tensor for each piece."""
        return [buffer.view() for buffers in self._by_size.values() for buffer in buffers]


def _elements(memory: Any, numel: int, dtype: torch.dtype) -> torch.Tensor:
    # A storage of all of it, which is what a tensor keeps in use.
    elements = torch.frombuffer(memory, dtype=dtype)
    return elements if numel < 0 else elements[:numel]


def in_pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages, at least one."""
    return max(-(-nbytes // _PAGE), 1) * _PAGE

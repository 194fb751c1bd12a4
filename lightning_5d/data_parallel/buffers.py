"""Large buffers that come back by themselves: fresh pages cost more than the copy they are needed for."""

from __future__ import annotations

import ctypes
import mmap
import weakref

import torch

_PAGE = mmap.PAGESIZE


class Buffer:
    """A piece of memory that is lent out as tensors.

    It counts as lent until the last tensor made from one loan is gone, whoever holds it: a gradient that a callback
    keeps for later keeps its memory.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self.nbytes = memory, len(memory)
        self.lent = False

    def lend(self) -> torch.Tensor:
        """The whole memory as bytes."""
        loan = (ctypes.c_char * self.nbytes).from_buffer(self._memory)
        self.lent = True
        weakref.finalize(loan, self._take_back).atexit = False
        return torch.frombuffer(loan, dtype=torch.uint8)

    def view(self) -> torch.Tensor:
        """The whole memory as bytes, to look at; does not count as lent."""
        return torch.frombuffer(self._memory, dtype=torch.uint8)

    def _take_back(self) -> None:
        self.lent = False


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
        return buffer.lend()[: numel * dtype.itemsize].view(dtype)

    def views(self) -> list[torch.Tensor]:
        """All of its memory, lent or not, one tensor for each piece."""
        return [buffer.view() for buffers in self._by_size.values() for buffer in buffers]


def in_pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages, at least one."""
    return max(-(-nbytes // _PAGE), 1) * _PAGE

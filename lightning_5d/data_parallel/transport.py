"""How bytes move between the ranks of one process group on CPU: the interface, and the choice between its two makers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist


class Arrival(ABC):
    """One exchange under way: what every rank has contributed, once :meth:`wait` returns."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether :meth:`wait` would return at once. Never blocks."""

    @abstractmethod
    def wait(self) -> Sequence[torch.Tensor]:
        """Blocks until all contributions are here and returns them in rank order.

        The tensors may be read until :meth:`release`, and must not be written.
        """

    @abstractmethod
    def release(self) -> None:
        """Says that this rank has read everything; the others may now reuse their memory."""


class Transport(ABC):
    """Moves one-dimensional buffers between the ranks of ``group``.

    Exchanges are matched by ``tag`` and, within a tag, by order. So ranks may start exchanges of different tags in
    different order (a branch that only some ranks take) and still meet.
    """

    #: Whether :meth:`Arrival.ready` can become true before someone waits.
    can_poll: bool = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()

    @abstractmethod
    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory (uninitialised, 1-D) from which :meth:`share` and :meth:`scatter` send without a further copy."""

    @abstractmethod
    def share(self, buffer: torch.Tensor, tag: int) -> Arrival:
        """Starts giving the whole ``buffer`` (made by :meth:`allocate`) to every rank: the heart of an all-gather."""

    @abstractmethod
    def scatter(self, buffer: torch.Tensor, tag: int, own: torch.Tensor | None = None) -> Arrival:
        """Starts giving part p of ``buffer`` (its p-th of ``size`` equal parts) to rank p: the heart of a reduce-scatter.

        With ``own``, this rank's part, which nobody else reads, ``buffer`` holds only those of the others in rank order.
        """

    def memory(self) -> list[torch.Tensor]:
        """The memory that this rank's transport keeps for reuse, lent or not; not what it maps of its peers."""
        return []

    def mapped(self) -> list[torch.Tensor]:
        """The memory of its peers that this rank reads in place."""
        return []

    def agree(self, flags: torch.Tensor) -> None:
        """Replaces a small integer tensor by its elementwise maximum over the group."""
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)

    @abstractmethod
    def close(self) -> None:
        """Gives back memory and connections. Exchanges under way are lost."""


def sum_in_rank_order(parts: Sequence[torch.Tensor], out: torch.Tensor, divide_by: float = 1.0) -> None:
    """Writes the sum of ``parts`` divided by ``divide_by`` into ``out``, always added in the order given.

    Half-precision parts are added in fp32, so that neither the sum overflows nor its error grows with the ranks; the
    order makes the result the same bits on every rank and in every run.
    """
    first, rest = parts[0], parts[1:]
    if out.dtype in (torch.float16, torch.bfloat16) or first.dtype in (torch.float16, torch.bfloat16):
        total = first.float()
        for part in rest:
            total += part
        if divide_by != 1.0:
            total /= divide_by
        out.copy_(total)
        return
    if not rest:
        torch.div(first, divide_by, out=out) if divide_by != 1.0 else out.copy_(first)
        return
    # Piecewise, so that the pieces stay in the processor's cache between the additions and the division.
    piece = 1 << 16
    for start in range(0, out.numel(), piece):
        target = out[start : start + piece]
        torch.add(first[start : start + piece], rest[0][start : start + piece], out=target)
        for part in rest[1:]:
            target += part[start : start + piece]
        if divide_by != 1.0:
            target /= divide_by

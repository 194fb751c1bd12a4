"""What the ranks of the tensor axis send each other: sums, gathers, and sums of which each keeps its part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_5d.data_parallel.traffic import Traffic

Reduction = Literal["sum", "max"]

_CPU = torch.device("cpu")


class Arriving(ABC):
    """A collective under way."""

    @abstractmethod
    def wait(self) -> Tensor:
        """Its result, which belongs to the caller. To be called once."""


class RankExchange:
    """What the ranks of a group send each other. Inputs are never written to.

    Attributes:
        rank: This rank's place in the group.
        size: Ranks.
        traffic: What was sent.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.traffic = Traffic()

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Uninitialised contiguous memory, from which the ``start_…`` methods may send without a copy.

        After it has been sent it must not be written to again: others may still read it.

        Args:
            shape: Its shape.
            like: A tensor of its dtype and device.
        """
        return like.new_empty(tuple(shape))

    def memory(self) -> list[Tensor]:
        """The memory that this rank keeps for reuse, whole."""
        return []

    def mapped(self) -> list[Tensor]:
        """The memory of other ranks that this one reads in place, whole."""
        return []

    def close(self) -> None:
        """Gives back what is held."""


class TensorAxis(RankExchange, ABC):
    """The collectives between the ranks that hold the same layers' shards; every rank calls them in the same order.

    Results are new tensors that the caller may keep and write to. The ``start_…`` methods return at once, and the input must then stay
    as it is until :meth:`Arriving.wait`.
    """

    @abstractmethod
    def start_sum(self, x: Tensor, reduction: Reduction = "sum") -> Arriving:
        """Starts an all-reduce of `x`, of any shape."""

    @abstractmethod
    def start_gather(self, x: Tensor, dim: int) -> Arriving:
        """Starts to put the ranks' parts one after the other along `dim`; all parts have one shape."""

    @abstractmethod
    def start_scatter_sum(self, x: Tensor, dim: int) -> Arriving:
        """Starts a reduce-scatter: the sum over the ranks, of which this rank gets its part of ``size`` equal ones along `dim`."""

    def sum(self, x: Tensor, reduction: Reduction = "sum") -> Tensor:
        """The sum (or largest) over the ranks, on each of them."""
        return self.start_sum(x, reduction).wait()

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The parts of all ranks, one after the other along `dim`."""
        return self.start_gather(x, dim).wait()

    def scatter_sum(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part, along `dim`, of the sum over the ranks."""
        return self.start_scatter_sum(x, dim).wait()


class CollectiveAxis(TensorAxis):
    """The axis on the collectives of its process group."""

    @override
    def start_sum(self, x: Tensor, reduction: Reduction = "sum") -> Arriving:
        result = x.detach().clone(memory_format=torch.contiguous_format)
        self.traffic.add("all_reduce", result.nbytes)
        operation = dist.ReduceOp.SUM if reduction == "sum" else dist.ReduceOp.MAX
        return _Collective(dist.all_reduce(result, operation, group=self.group, async_op=True), result)

    @override
    def start_gather(self, x: Tensor, dim: int) -> Arriving:
        part = x.detach().movedim(dim, 0).contiguous()
        result = part.new_empty((self.size * part.shape[0], *part.shape[1:]))
        self.traffic.add("all_gather", result.nbytes)
        work = dist.all_gather_single(result, part, group=self.group, async_op=True)
        return _Collective(work, result, dim, keep=part)

    @override
    def start_scatter_sum(self, x: Tensor, dim: int) -> Arriving:
        whole = x.detach().movedim(dim, 0).contiguous()
        self.traffic.add("reduce_scatter", whole.nbytes)
        result = whole.new_empty((whole.shape[0] // self.size, *whole.shape[1:]))
        work = dist.reduce_scatter_single(result, whole, group=self.group, async_op=True)
        return _Collective(work, result, dim, keep=whole)


class _Collective(Arriving):
    def __init__(self, work: dist.Work | None, result: Tensor, dim: int = 0, keep: Tensor | None = None) -> None:
        self._work, self._result, self._dim, self._keep = work, result, dim, keep

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        self._work = self._keep = None
        return self._result.movedim(0, self._dim).contiguous() if self._dim else self._result


def open_axis(
    group: dist.ProcessGroup, device: torch.device = _CPU, *, shared_memory: bool = True, name: str = "tensor group"
) -> TensorAxis:
    """The fastest way the ranks of a group can reach each other; all of them call it.

    Args:
        group: The ranks.
        device: Where their tensors are.
        shared_memory: CPU ranks of one host read straight from each other's memory.
        name: What these ranks are called in errors.
    """
    if device.type == "cpu" and shared_memory and group.size() > 1:
        from lightning_5d.tensor_parallel.host_axis import HostAxis

        if (axis := HostAxis.connect(group, name)) is not None:
            return axis
    return CollectiveAxis(group)

"""The tensor axis between CPU ranks of one host, who read straight from each other's memory.

A rank puts its part where the others can read it and says so; each then forms what it needs from all parts itself, always
in the order of the ranks. So there is one message and no second wait, a result has the same bits on every rank, and what is
computed between the start of a collective and its end hides the wait for ranks that are later. With more than two ranks a
large sum goes in two steps, a scatter and a gather, since each rank would else add everything up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_5d.data_parallel.host_memory import HostMemory, Peer
from lightning_5d.data_parallel.transports import timeout_s_of
from lightning_5d.tensor_parallel.axis import Arriving, Reduction, TensorAxis

_TAG = 0
_HALF = (torch.float16, torch.bfloat16)
# From so many bytes on a sum over more than two ranks goes in two steps.
_LARGE = 1 << 16


class HostAxis(TensorAxis):
    """The axis on shared memory. Made by `connect`.

    Args:
        group: The ranks.
        host: Their memory.
        name: What these ranks are called in errors.
    """

    def __init__(self, group: dist.ProcessGroup, host: HostMemory, name: str = "tensor group") -> None:
        super().__init__(group)
        self._name = name
        self._host = host
        self._peers = tuple(host.peers.values())
        self._number = 0

    @classmethod
    def connect(cls, group: dist.ProcessGroup, name: str = "tensor group") -> HostAxis | None:
        """Connects all ranks of a group, or returns ``None`` on all of them if one cannot reach another this way."""
        host = HostMemory.connect(group, timeout_s_of(group), name)
        return None if host is None else cls(group, host, name)

    @override
    def start_sum(self, x: Tensor, reduction: Reduction = "sum") -> Arriving:
        self.traffic.add("all_reduce", x.nbytes)
        if not x.numel():
            return _Nothing(x, x.shape)
        if self.size > 2 and x.nbytes >= _LARGE and reduction == "sum":
            return _SumInTwoSteps(self, self._publish(x), x)
        return _Parts(self, self._publish(x), x, lambda parts: combined(parts, reduction))

    @override
    def start_gather(self, x: Tensor, dim: int) -> Arriving:
        self.traffic.add("all_gather", x.nbytes * self.size)
        dim %= x.ndim
        if not x.numel():
            return _Nothing(x, [size * (self.size if d == dim else 1) for d, size in enumerate(x.shape)])

        def join(parts: Sequence[Tensor]) -> Tensor:
            result: Tensor = torch.cat(tuple(parts), dim)
            return result

        return _Parts(self, self._publish(x), x, join)

    @override
    def start_scatter_sum(self, x: Tensor, dim: int) -> Arriving:
        self.traffic.add("reduce_scatter", x.nbytes)
        length, rest = divmod(x.shape[dim], self.size)
        if rest:
            raise ValueError(f"{self.size} ranks do not divide dimension {dim} of {tuple(x.shape)}.")

        if not x.numel():
            return _Nothing(x, [length if d == dim % x.ndim else size for d, size in enumerate(x.shape)])

        def own(parts: Sequence[Tensor]) -> Tensor:
            return combined([part.narrow(dim, self.rank * length, length) for part in parts], "sum")

        return _Parts(self, self._publish(x), x, own)

    @override
    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        if like.device.type != "cpu":
            return super().empty(shape, like)
        return self._host.allocate(math.prod(shape), like.dtype, self._peers).view(tuple(shape))

    @override
    def memory(self) -> list[Tensor]:
        return self._host.memory()

    @override
    def mapped(self) -> list[Tensor]:
        return self._host.mapped()

    @override
    def close(self) -> None:
        self._host.close()

    def _publish(self, x: Tensor) -> int:
        """Lets the others read `x`; returns the number of the message."""
        number = self.reserve()
        self.publish_as(number, x)
        return number

    def reserve(self) -> int:
        """The number of a message."""
        number, self._number = self._number, self._number + 1
        return number

    def publish_as(self, number: int, x: Tensor) -> None:
        """Lets the others read `x` as that message."""
        x = x.detach()
        if not x.is_contiguous():
            x = self.empty(x.shape, x).copy_(x)
        self._host.publish(x.view(-1), _TAG, number, self._peers)

    def read(self, number: int, shape: torch.Size, like: Tensor) -> tuple[list[Tensor], list[tuple[Peer, int]]]:
        """Waits for message `number` of all others; returns them in the order of the ranks, where they are, and what to say `done` to."""
        parts: list[Tensor] = []
        taken: list[tuple[Peer, int]] = []
        expected = math.prod(shape) * like.itemsize
        for peer in self._peers:
            block, nbytes = self._host.await_ready(peer, _TAG, number)
            if nbytes != expected:
                raise RuntimeError(
                    f"Rank {peer.rank} of the {self._name} sent {nbytes} bytes where rank {self.rank} has {expected}: its ranks have"
                    " to run the same modules on the same batch."
                )
            parts.append(peer.blocks[block].view(nbytes // like.itemsize, like.dtype).view(shape))
            taken.append((peer, block))
        return parts, taken

    def done(self, taken: Sequence[tuple[Peer, int]]) -> None:
        """Lets the others have their memory back."""
        for peer, block in taken:
            self._host.done(peer, block)


class _Nothing(Arriving):
    """What comes of a batch without rows: ranks have the same one, so none of them sends anything."""

    def __init__(self, like: Tensor, shape: Sequence[int]) -> None:
        self._result = like.detach().new_empty(tuple(shape))

    def wait(self) -> Tensor:
        """See `Arriving.wait`."""
        return self._result


class _Parts(Arriving):
    """One message, of which a result is formed at once."""

    def __init__(self, axis: HostAxis, number: int, own: Tensor, result: Callable[[Sequence[Tensor]], Tensor]) -> None:
        self._axis, self._number, self._own, self._result = axis, number, own.detach(), result

    def wait(self) -> Tensor:
        """See `Arriving.wait`."""
        parts, taken = self._axis.read(self._number, self._own.shape, self._own)
        parts.insert(self._axis.rank, self._own)
        result = self._result(parts)
        self._axis.done(taken)
        return result


class _SumInTwoSteps(Arriving):
    """Each rank sums one part and lends it to the others."""

    def __init__(self, axis: HostAxis, number: int, own: Tensor) -> None:
        self._axis, self._number, self._own = axis, number, own.detach()
        # The second step's number is taken now, so that all ranks count alike in whatever order they wait.
        self._second = axis.reserve()

    def wait(self) -> Tensor:
        """See `Arriving.wait`."""
        axis, own = self._axis, self._own
        flat = own.reshape(-1)
        length = -(-flat.numel() // axis.size)
        bounds = [(min(r * length, flat.numel()), min((r + 1) * length, flat.numel())) for r in range(axis.size)]
        parts, taken = axis.read(self._number, flat.shape, flat)
        parts.insert(axis.rank, flat)
        start, end = bounds[axis.rank]
        total = axis.empty((length,), flat)
        combined([part[start:end] for part in parts], "sum", total[: end - start])
        axis.publish_as(self._second, total)
        axis.done(taken)
        result = torch.empty(own.shape, dtype=own.dtype)
        whole = result.view(-1)
        whole[start:end].copy_(total[: end - start])
        sums, taken = axis.read(self._second, total.shape, total)
        for (peer, _), theirs in zip(taken, sums, strict=True):
            start, end = bounds[peer.rank]
            whole[start:end].copy_(theirs[: end - start])
        axis.done(taken)
        return result


def combined(parts: Sequence[Tensor], reduction: Reduction, out: Tensor | None = None) -> Tensor:
    """The sum (or largest) of tensors of one shape, formed in their order; 16-bit ones are added up in fp32."""
    first = parts[0]
    if out is None:
        out = torch.empty(first.shape, dtype=first.dtype)
    if reduction == "max":
        torch.maximum(first, parts[1], out=out)
        for part in parts[2:]:
            torch.maximum(out, part, out=out)
    elif first.dtype in _HALF and len(parts) > 2:
        total = first.float()
        for part in parts[1:]:
            total += part
        out.copy_(total)
    else:
        # Of two, 16-bit addition is fp32 addition with one rounding, as the kernels do it.
        torch.add(first, parts[1], out=out)
        for part in parts[2:]:
            out += part
    return out

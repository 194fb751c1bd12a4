"""Stage 0 with plain parameters: gradients are averaged in buckets while backward runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_5d.data_parallel.reduction import AllReduce
from lightning_5d.data_parallel.traffic import Traffic
from lightning_5d.data_parallel.transport import Transport, sum_in_rank_order


class _Bucket:
    def __init__(self, index: int, params: Sequence[nn.Parameter]) -> None:
        self.index, self.params = index, list(params)
        self.wanted: list[nn.Parameter] = []
        self.all_reduce: AllReduce | None = None
        self.reset()

    def reset(self) -> None:
        self.missing = set(range(len(self.params)))
        self.again = self.discard = False
        self.wanted: set[int] = set()
        self.all_reduce = None

    def deliver(self, parts: Sequence[torch.Tensor], divide_by: float) -> None:
        """Writes the means into the gradients of the wanted parameters."""
        if self.discard:
            return
        offset = 0
        for position, param in enumerate(self.params):
            numel = _local(param).numel()
            if position in self.wanted:
                pieces = [part[offset : offset + numel] for part in parts]
                grad = _local(param.grad) if param.grad is not None else torch.empty_like(_local(param))
                flat = grad.view(-1) if grad.is_contiguous() else torch.empty_like(pieces[0])
                sum_in_rank_order(pieces, flat, divide_by)
                if not grad.is_contiguous():
                    grad.copy_(flat.view_as(grad))
                if param.grad is None:
                    param.grad = grad
            offset += numel


class GradientReducer:
    """Averages the gradients of plain parameters over one group, like torch's DDP but without a wrapper module.

    Buckets hold parameters of one dtype in reverse order of registration, about ``bucket_bytes`` each. A bucket starts
    as soon as its last gradient is there. Parameters that no rank used keep ``grad`` None; one used by some ranks only
    gets zeros from the others.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        transport: Transport,
        traffic: Traffic,
        bucket_bytes: int = 8 << 20,
    ) -> None:
        self._transport, self._traffic = transport, traffic
        self.params = [param for param in params if param.requires_grad]
        self._buckets = _fill_buckets(self.params, bucket_bytes)
        self._place = {
            param: (bucket, position) for bucket in self._buckets for position, param in enumerate(bucket.params)
        }
        self._handles = [
            param.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for param in self.params
        ]
        self.synchronize = True
        self.used: set[int] = set()
        self._number = {param: index for index, param in enumerate(self.params)}

    def covers(self, params: Sequence[nn.Parameter]) -> bool:
        """Whether this reducer was made for exactly these parameters."""
        return len(params) == len(self.params) and all(a is b for a, b in zip(params, self.params, strict=True))

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def _on_gradient(self, param: torch.Tensor) -> None:
        bucket, position = self._place[param]  # type: ignore[index]
        self.used.add(self._number[param])  # type: ignore[index]
        if not self.synchronize:
            return
        if bucket.all_reduce is not None:
            bucket.again = True  # a second backward in one window: what was sent is not all there is
            return
        bucket.missing.discard(position)
        if not bucket.missing:
            self._start(bucket)

    def _start(self, bucket: _Bucket) -> None:
        numel = sum(_local(param).numel() for param in bucket.params)
        padded = -(-numel // self._transport.size) * self._transport.size
        dtype = bucket.params[0].dtype
        buffer = self._transport.allocate(padded, dtype)
        offset = 0
        for param in bucket.params:
            target = buffer[offset : offset + _local(param).numel()]
            if param.grad is None:
                target.zero_()
            else:
                target.view_as(grad := _local(param.grad)).copy_(grad)
            offset += _local(param).numel()
        if padded > numel:
            buffer[numel:].zero_()
        bucket.all_reduce = AllReduce(self._transport, buffer, bucket.index, self._transport.size, bucket.deliver)
        self._traffic.add("all_reduce", padded * dtype.itemsize)

    def finish(self) -> None:
        """Completes the window: every used parameter's ``grad`` is the mean over the ranks when this returns."""
        if not self.synchronize:
            return
        buckets = len(self._buckets)
        flags = torch.zeros(len(self.params) + buckets, dtype=torch.int32)
        flags[list(self.used)] = 1
        for bucket in self._buckets:
            flags[len(self.params) + bucket.index] = int(bucket.again)
        self._transport.agree(flags)
        used = set(flags[: len(self.params)].nonzero().flatten().tolist())
        again = flags[len(self.params) :].tolist()
        for bucket in self._buckets:
            bucket.wanted = {position for position, param in enumerate(bucket.params) if self._number[param] in used}
            if again[bucket.index] and bucket.all_reduce is not None:
                bucket.discard = True  # it lacks what a later backward added
                _complete([bucket])
                bucket.discard, bucket.all_reduce = False, None
            if bucket.wanted and bucket.all_reduce is None:
                self._start(bucket)
        _complete(self._buckets)
        for bucket in self._buckets:
            bucket.reset()
        self.used.clear()


def _complete(buckets: Sequence[_Bucket]) -> None:
    """Moves all buckets forward phase by phase, so that each phase has begun everywhere before anyone waits for it."""
    open_ones = [bucket.all_reduce for bucket in buckets if bucket.all_reduce is not None]
    while open_ones:
        open_ones = [all_reduce for all_reduce in open_ones if not all_reduce.advance(block=True)]


def _fill_buckets(params: Sequence[nn.Parameter], bucket_bytes: int) -> list[_Bucket]:
    """Parameters in reverse order (that in which gradients arrive), cut into buckets of one dtype."""
    buckets: list[_Bucket] = []
    filling: dict[torch.dtype, list[nn.Parameter]] = {}
    for param in reversed(params):
        members = filling.setdefault(param.dtype, [])
        members.append(param)
        if sum(member.numel() * member.itemsize for member in members) >= bucket_bytes:
            buckets.append(_Bucket(len(buckets), filling.pop(param.dtype)))
    for members in filling.values():
        buckets.append(_Bucket(len(buckets), members))
    return buckets


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""Stage 0 with plain parameters: gradients are averaged in buckets while backward runs."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_5d.data_parallel.reduction import AllReduce, PendingReductions
from lightning_5d.data_parallel.traffic import Traffic
from lightning_5d.data_parallel.transport import Transport, sum_in_rank_order


class _Bucket:
    def __init__(self, index: int, params: Sequence[nn.Parameter], part: int | None) -> None:
        self.index, self.params, self.part = index, list(params), part
        self.all_reduce: AllReduce | None = None
        self.reset()

    def reset(self) -> None:
        self.missing = set(range(len(self.params)))
        self.again = False
        self.wanted: set[int] = set()
        self.all_reduce = None

    def deliver(self, parts: Sequence[torch.Tensor], divide_by: float, own: torch.Tensor) -> None:
        """Writes the means into the gradients of the wanted parameters."""
        offset = 0
        for position, param in enumerate(self.params):
            here = slice(offset, offset + _local(param).numel())
            offset = here.stop
            if position not in self.wanted:
                continue
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            grad = _local(param.grad)
            in_place = grad.is_contiguous() and not self.again
            mean = grad.view(-1) if in_place else torch.empty_like(own[here])
            sum_in_rank_order([part[here] for part in parts], mean, divide_by)
            if self.again:  # keep what a later backward has added since this was sent
                grad.add_((mean - own[here]).view_as(grad))
            elif not in_place:
                grad.copy_(mean.view_as(grad))


class GradientReducer:
    """Averages the gradients of plain parameters over one group, like torch's DDP but without a wrapper module.

    Buckets hold parameters of one dtype in reverse order of registration, about ``bucket_bytes`` each. A bucket starts
    as soon as its last gradient is there. Parameters that no rank used keep ``grad`` None; one used by some ranks only
    gets zeros from the others.

    Args:
        params: The parameters; frozen ones are left out.
        transport: Connects the ranks.
        traffic: Counts what is sent.
        bucket_bytes: About the size of a bucket.
        parts: For a schedule of microbatches: the part that alone uses a parameter, ``None`` for none. Buckets then hold
            parameters of one part, and start when the part is said to be complete. Nothing is hooked, as gradients of a
            schedule come in any order and need not come from autograd.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        transport: Transport,
        traffic: Traffic,
        bucket_bytes: int = 8 << 20,
        parts: Mapping[nn.Parameter, int | None] | None = None,
    ) -> None:
        self._transport, self._traffic = transport, traffic
        self.params = [param for param in params if param.requires_grad]
        self._hooked = parts is None
        self._buckets = _fill_buckets(self.params, bucket_bytes, parts or {})
        self._place = {
            param: (bucket, position) for bucket in self._buckets for position, param in enumerate(bucket.params)
        }
        # Not a method of this: parameters and what their hooks hold are never collected (torch 2.13), as no cycle is seen through them.
        told = partial(_tell, weakref.ref(self))
        self._handles = [
            param.register_post_accumulate_grad_hook(told)  # type: ignore[no-untyped-call]
            for param in self.params
            if self._hooked
        ]
        self._pending = PendingReductions()
        if not self._hooked:
            self._pending.in_flight = len(self._buckets)  # they start together: a wait would hold up other parts
        self.synchronize = True
        self.used: set[int] = set()
        self._failed = False
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
            bucket.wanted = set(range(len(bucket.params)))
            self._start(bucket)

    def part_is_complete(self, part: int) -> None:
        """Starts the buckets of a part that have all their gradients; the others wait for `finish`."""
        if not self.synchronize:
            return
        for bucket in self._buckets:
            ready = bucket.part == part and bucket.all_reduce is None
            if ready and all(param.grad is not None for param in bucket.params):
                bucket.wanted = set(range(len(bucket.params)))
                self._start(bucket)

    def drop(self) -> None:
        """Forgets a window that has failed, without waiting for anyone; the next one begins with `settle`."""
        if self.synchronize:
            self._pending.drop()
            started = [bucket for bucket in self._buckets if bucket.all_reduce is not None]
            self.used = {self._number[param] for bucket in started for param in bucket.params}
            self._failed = True

    def settle(self) -> None:
        """Ends with all ranks what they had started when a window failed; no rank can do so alone."""
        if self._failed:
            self._failed = False
            self._complete()

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
        # Means are taken in while backward runs: they are still in the processor's cache, and buffers come back early.
        self._pending.add(bucket.all_reduce, self._transport.can_poll)

    def finish(self) -> None:
        """Completes the window: every used parameter's ``grad`` is the mean over the ranks when this returns."""
        if not self.synchronize or not self.params:  # a stage of a pipeline may have nothing to train
            return
        present = {number for number, param in enumerate(self.params) if param.grad is not None}
        self.used = self.used & present if self._hooked else present  # what a user has cleared since is used by nobody
        self._complete()

    def _complete(self) -> None:
        buckets = len(self._buckets)
        flags = torch.zeros(len(self.params) + buckets, dtype=torch.int32)
        flags[list(self.used)] = 1
        for bucket in self._buckets:
            flags[len(self.params) + bucket.index] = int(bucket.again)
        self._transport.agree(flags)
        used = set(flags[: len(self.params)].nonzero().flatten().tolist())
        again = flags[len(self.params) :].tolist()
        for bucket in self._buckets:
            if bucket.all_reduce is None:
                bucket.wanted = {position for position, p in enumerate(bucket.params) if self._number[p] in used}
                if bucket.wanted:
                    self._start(bucket)
        self._pending.finish()
        for bucket in self._buckets:
            if again[bucket.index] and bucket.wanted:
                bucket.again = False
                self._start(bucket)
        self._pending.finish()
        for bucket in self._buckets:
            bucket.reset()
        self.used.clear()


def _tell(reference: weakref.ref[GradientReducer], param: torch.Tensor) -> None:
    reducer = reference()
    if reducer is not None:
        reducer._on_gradient(param)


def _fill_buckets(
    params: Sequence[nn.Parameter], bucket_bytes: int, parts: Mapping[nn.Parameter, int | None]
) -> list[_Bucket]:
    """Parameters in reverse order (that in which gradients arrive), cut into buckets of one part and dtype."""
    buckets: list[_Bucket] = []
    filling: dict[tuple[int | None, torch.dtype], list[nn.Parameter]] = {}
    for param in reversed(params):
        key = parts.get(param), param.dtype
        members = filling.setdefault(key, [])
        members.append(param)
        if sum(member.numel() * member.itemsize for member in members) >= bucket_bytes:
            buckets.append(_Bucket(len(buckets), filling.pop(key), key[0]))
    for (part, _), members in filling.items():
        buckets.append(_Bucket(len(buckets), members, part))
    return buckets


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""What the hosts of the data ranks agree on in every step, without waiting for an accelerator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_5d.data_parallel.transport import Transport


class Agreement:
    """Elementwise maxima of a few small numbers over the data ranks.

    The numbers are known to the hosts, and the hosts need the answer. So it travels between hosts: through the transports
    on CPU, else through process groups that serve the CPU. On the accelerator it would queue behind the whole backward.

    Args:
        transports: Those of the shard and the replicate axis, where there are any.
        groups: The process groups of the same axes. Beside one that does not serve the CPU a gloo group is made, for which
            all ranks of the group must come here.
    """

    def __init__(self, transports: Sequence[Transport], groups: Sequence[dist.ProcessGroup]) -> None:
        self._transports = transports
        self._groups = [] if transports else [group if serves_cpu(group) else _beside(group) for group in groups]

    def maximum(self, numbers: Sequence[int]) -> list[int]:
        """The largest value of each number over all ranks. Every rank must call it with as many numbers."""
        flags = torch.tensor(numbers, dtype=torch.int32)
        for transport in self._transports:
            transport.agree(flags)
        for group in self._groups:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
        agreed: list[int] = flags.tolist()
        return agreed


def serves_cpu(group: dist.ProcessGroup) -> bool:
    """Whether collectives on CPU tensors work in ``group``: gloo's, and those opened as ``"cpu:gloo,cuda:nccl"``."""
    # torch has no public way to ask (checked with 2.13).
    return torch.device("cpu") in group._device_types


def _beside(group: dist.ProcessGroup) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(group)
    made: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return made

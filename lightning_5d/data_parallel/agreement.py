"""What the hosts of the data ranks agree on in every step, without waiting for an accelerator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_5d.data_parallel.transport import Transport


class Agreement:
    """Elementwise maxima of a few small numbers over the data ranks.

    The numbers are known to the host and the host needs the answer, so they travel between hosts where that is possible:
    through the transports on CPU, or by a process group that serves the CPU beside its accelerator. Else a device tensor
    goes through the accelerator's queue, behind the backward that is in it.

    Args:
        transports: Those of the shard and the replicate axis, where there are any.
        groups: The process groups of the same axes.
        device: The device that the module is on.
    """

    def __init__(
        self, transports: Sequence[Transport], groups: Sequence[dist.ProcessGroup], device: torch.device
    ) -> None:
        self._transports, self._groups = transports, groups
        cpu = torch.device("cpu")
        # Checked with torch 2.13: a group opened with "cpu:gloo,cuda:nccl" lists both devices here.
        self._device = cpu if all(cpu in group._device_types for group in groups) else device

    def maximum(self, numbers: Sequence[int]) -> list[int]:
        """The largest value of each number over all ranks. Every rank must call it with as many numbers."""
        if self._transports:
            flags = torch.tensor(numbers, dtype=torch.int32)
            for transport in self._transports:
                transport.agree(flags)
        else:
            flags = torch.tensor(numbers, dtype=torch.int32, device=self._device)
            for group in self._groups:
                dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
        agreed: list[int] = flags.tolist()
        return agreed

"""Chooses how a group's ranks exchange."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_5d.data_parallel.point_to_point import PointToPoint
from lightning_5d.data_parallel.shared_memory import SharedMemory
from lightning_5d.data_parallel.transport import Transport

_CPU = torch.device("cpu")


def open_transport(group: dist.ProcessGroup, shared_memory: bool = True) -> Transport:
    """Opens the fastest transport that works between all ranks of ``group``. All of them must call it."""
    if shared_memory and (transport := SharedMemory.connect(group, timeout_s_of(group))) is not None:
        return transport
    return PointToPoint(group)


def timeout_s_of(group: dist.ProcessGroup, device: torch.device = _CPU) -> float:
    """The longest wait for a collective of a group on a device, in seconds."""
    # torch has no public way to ask for a group's timeout (checked with 2.13).
    options = getattr(group._get_backend(device), "options", None)
    timeout: timedelta = getattr(options, "_timeout", dist.default_pg_timeout)
    return timeout.total_seconds()

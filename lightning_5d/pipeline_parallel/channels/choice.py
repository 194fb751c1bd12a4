"""Chooses what carries messages between the ranks of a pipeline."""

# [Note: no deadlock between accelerators]
# A communicator of an accelerator does what it is given in order, and a receive that is posted ahead holds up a send behind it, for
# which the one who should send may be waiting. Where groups are bound to a device, all sends and receives of a group share one
# communicator. So each direction between two ranks has a group to itself. A communicator is made at its first message, by both
# ends together; that happens here, in an order that is the same for all.

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lightning_5d.data_parallel.host_memory import HostMemory
from lightning_5d.pipeline_parallel.channels.channels import Channels
from lightning_5d.pipeline_parallel.channels.groups import GroupChannels, Line, PolledOutbox, ThreadOutbox
from lightning_5d.pipeline_parallel.channels.host import HostChannels

if TYPE_CHECKING:
    from lightning_5d.mesh import ParallelMesh


def open_channels(
    mesh: ParallelMesh,
    device: torch.device,
    timeout: timedelta,
    pairs: Iterable[tuple[int, int]] | None = None,
    shared_memory: bool = True,
) -> Channels:
    """See `Channels.open`.

    Args:
        mesh: The ranks by axis.
        device: Where this rank's tensors are.
        timeout: The longest wait.
        pairs: Places of ranks that send each other messages.
        shared_memory: Ranks on one host exchange through shared memory where possible (CPU only).
    """
    if mesh.size("pp") == 1:
        return GroupChannels(device, {}, {}, PolledOutbox(), None)
    if device.type != "cpu":
        return pair_channels(mesh, device, timeout, pairs)
    group = mesh.group("pp")
    if shared_memory and (host := HostMemory.connect(group, timeout.total_seconds(), "pipeline")) is not None:
        return HostChannels(host)
    lines = {place: Line(group, place) for place in range(group.size()) if place != group.rank()}
    return GroupChannels(device, lines, lines, ThreadOutbox(timeout), timeout)


def pair_channels(
    mesh: ParallelMesh, device: torch.device, timeout: timedelta, pairs: Iterable[tuple[int, int]] | None
) -> GroupChannels:
    """Channels with a process group for each direction between two ranks; all ranks of the world call it."""
    size, own = mesh.size("pp"), dist.get_rank()
    if pairs is None:
        pairs = [(place, (place + 1) % size) for place in range(size)]
    directed = sorted({pair for a, b in pairs if a != b for pair in ((a, b), (b, a))})
    out, incoming = {}, {}
    for line in mesh.device_mesh.mesh.movedim(mesh.names.index("pp"), -1).reshape(-1, size).tolist():
        for sender, receiver in directed:
            ranks = [line[sender], line[receiver]]
            group = dist.new_group(ranks, timeout=timeout)
            if own not in ranks:
                continue
            first = torch.zeros(1, dtype=torch.uint8, device=device)
            if own == line[sender]:
                out[receiver] = Line(group, dist.get_group_rank(group, line[receiver]))
                dist.send(first, group=group, group_dst=out[receiver].peer)
            else:
                incoming[sender] = Line(group, dist.get_group_rank(group, line[sender]))
                dist.recv(first, group=group, group_src=incoming[sender].peer)
    return GroupChannels(device, out, incoming, PolledOutbox(), None)

"""Ranks that start reductions in different orders end them together."""

import time

import torch
import torch.distributed as dist

from lightning_5d.data_parallel.reduction import AllReduce, PendingReductions
from lightning_5d.data_parallel.transports import open_transport


def _ahead_with_different_ones(rank: int, world: int) -> list[list[float]]:
    transport = open_transport(dist.group.WORLD)
    pending, sums = PendingReductions(), {}
    for tag in (0, 1) if rank == 0 else (1, 0):
        buffer = transport.allocate(world, torch.float32).fill_(10.0**tag)

        def take(parts, divide_by, own, tag=tag):
            sums[tag] = (sum(parts) / divide_by).tolist()

        pending.add(AllReduce(transport, buffer, tag, 1.0, take), can_poll=False)
    give_up = time.monotonic() + 10
    while pending._queue[0].phase < 1 and time.monotonic() < give_up:  # each rank gets ahead with the one it began with
        pending._progress()
    dist.barrier()
    pending.finish()
    transport.close()
    return [sums[0], sums[1]]


def test_ranks_that_are_ahead_with_different_reductions_do_not_wait_for_each_other(ranks):
    for sums in ranks(3, _ahead_with_different_ones, 3, timeout=20):
        assert sums == [[3.0] * 3, [30.0] * 3]

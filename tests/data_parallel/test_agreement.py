"""Maxima over the data ranks, known to every host."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lightning_5d.data_parallel import agreement
from lightning_5d.data_parallel.agreement import Agreement
from lightning_5d.data_parallel.transports import open_transport


def _agreed(rank: int, way: str) -> list[list[int]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    groups = [mesh["dp_shard"].get_group(), mesh["dp_replicate"].get_group()]
    by_transport = way in ("shared memory", "messages")
    transports = [open_transport(group, way == "shared memory") for group in groups] if by_transport else []
    with pytest.MonkeyPatch.context() as patch:
        if way == "beside":  # as on an accelerator, whose groups do not serve the CPU
            patch.setattr(agreement, "serves_cpu", lambda group: False)
        made = Agreement(transports, groups)
    seen = [made.maximum([rank, 3 - rank, 7, int(rank == step)]) for step in range(4)]
    for transport in transports:
        transport.close()
    return seen


@pytest.mark.parametrize("way", ["shared memory", "messages", "groups", "beside"])
def test_every_rank_learns_the_largest_of_each_number(ranks, way):
    for seen in ranks(4, _agreed, way, timeout=40):
        assert seen == [[3, 3, 7, 1]] * 4


def test_a_gloo_group_serves_the_cpu(ranks):
    assert ranks(2, _serves, timeout=30) == [True, True]


def _serves(rank: int) -> bool:
    return agreement.serves_cpu(torch.distributed.group.WORLD)

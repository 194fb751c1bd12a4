"""What is assigned to `data` of a parameter that lies on several ranks becomes its values."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_5d.data_parallel.assigned_data import assigned_data
from tests.ranks.pool import RankPool

VALUES = torch.arange(10.0).view(5, 2)


def _assign(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)]))
    local = weight.data_ptr(), weight.to_local().data_ptr()  # type: ignore[attr-defined]
    found: dict[str, Any] = {}
    with assigned_data():
        with assigned_data():
            weight.data = weight.data + distribute_tensor(VALUES, mesh, [Shard(0)])
        found["equally placed"] = weight.full_tensor().detach().clone()  # type: ignore[attr-defined]
        weight.data = distribute_tensor(2 * VALUES, mesh, [Replicate()])
        found["placed otherwise"] = weight.full_tensor().detach().clone()  # type: ignore[attr-defined]
        found["the same memory"] = local == (weight.data_ptr(), weight.to_local().data_ptr())  # type: ignore[attr-defined]
        found["trained"] = weight.requires_grad and not weight.data.requires_grad
        plain = nn.Parameter(torch.zeros(2))
        plain.data = torch.ones(2)
        found["plain"] = plain.detach().clone()
    found["left alone afterwards"] = "data" not in vars(DTensor)
    return found


def test_values_arrive_whatever_their_placement(ranks: RankPool) -> None:
    for found in ranks(2, _assign):
        assert torch.equal(found["equally placed"], VALUES)
        assert torch.equal(found["placed otherwise"], 2 * VALUES)
        assert torch.equal(found["plain"], torch.ones(2))
        assert all(found[key] for key in ("the same memory", "trained", "left alone afterwards"))

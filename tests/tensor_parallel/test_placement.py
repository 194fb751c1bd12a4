"""Weights as DTensors over the tensor axis."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_5d.checkpoint.forms import Formed, whole_tensor
from lightning_5d.checkpoint.full_state import place_like
from lightning_5d.mesh import AXES, ParallelMesh
from lightning_5d.tensor_parallel.layout import TensorLayout
from lightning_5d.tensor_parallel.placement import place
from lightning_5d.tensor_parallel.rows import Rows, even
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parted import GROUPS, SIZE, Parted, layout_for


def _mesh(dp: int, tp: int) -> ParallelMesh:
    return ParallelMesh.create({axis: {"dp_shard": dp, "tp": tp}.get(axis, 1) for axis in AXES}, "cpu")


def _odd(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    module = Parted(layers=1, frozen=("q.",)).to(dtype)
    module.layers[0].mixer.gate_up.weight.data = module.layers[0].mixer.gate_up.weight.data.t().contiguous().t()
    return module


def _placed(rank: int, tp: int, dtype: torch.dtype) -> dict[str, tuple[Tensor, Any]]:
    module, mesh = _odd(dtype), _mesh(1, tp)
    before = dict(module.named_parameters())
    layout = layout_for(module, tp)
    place(module, layout, mesh)
    assert module.head.weight is module.embed.weight
    found = dict(module.named_parameters())
    assert list(found) == list(before)
    for name, parameter in found.items():
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter.data, DTensor)
        assert parameter.device_mesh == mesh.device_mesh["tp"]
        assert parameter.requires_grad == before[name].requires_grad
        assert parameter.dtype == dtype
        local = parameter.to_local()
        assert local.is_contiguous()
        assert local.untyped_storage().nbytes() == local.nbytes  # nothing of the whole weight stays behind it
        rows = layout.weights.get(name)
        assert parameter.placements == ((Replicate(),) if rows is None else (Shard(rows.dim),))
        expected = before[name] if rows is None else rows.part(before[name].detach(), rank, tp)
        assert torch.equal(local, expected), name
        gathered = whole_tensor(parameter if rows is None else Formed(parameter, rows))
        assert torch.equal(gathered, before[name]), name
    return {name: parameter.to_local().detach().float() for name, parameter in found.items()}


@pytest.mark.parametrize(("tp", "dtype"), [(2, torch.float32), (4, torch.bfloat16)])
def test_each_rank_holds_its_part_of_every_weight(ranks: RankPool, tp: int, dtype: torch.dtype) -> None:
    found = ranks(tp, _placed, tp, dtype)
    values = [each["layers.0.mixer.v.weight"] for each in found]
    copies = tp // GROUPS
    assert values[0].shape == (SIZE, 8)
    for rank in range(tp):
        assert torch.equal(values[rank], values[rank - rank % copies])
    assert not torch.equal(values[0], values[-1])
    padded = found[-1]["embed.weight"]
    assert not padded[-(-13 % tp) :].any()
    assert padded[0].all()


def _meta(rank: int) -> None:
    with torch.device("meta"):
        module = Parted(layers=1)
    place(module, layout_for(module, 4), _mesh(1, 4))
    values, embed = module.layers[0].mixer.v.weight, module.embed.weight
    assert values.is_meta
    assert embed.is_meta
    assert values.shape == (4 * SIZE, 8)
    assert values.to_local().shape == (SIZE, 8)
    assert embed.shape == (16, 8)
    assert embed.to_local().shape == (4, 8)


def test_meta_weights_stay_on_the_meta_device(ranks: RankPool) -> None:
    ranks(4, _meta)


def _wrong(rank: int) -> None:
    place(nn.Linear(3, 4), TensorLayout(weights={"weight": even(0, 6)}), _mesh(1, 2))


def test_a_layout_of_another_module_is_refused_with_both_numbers(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"weight of shape \(4, 3\) cannot be cut along dimension 0 from 6 rows into 2"):
        ranks(2, _wrong)


# What FSDP2 and torch make of such parameters; see `checkpoint/forms.py`.
def _sharded_again(rank: int, dp: int, tp: int) -> None:
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    for rows in (tp, 3 * tp, 5 * tp):
        for dim in (0, 1):
            shape = (rows, 5) if dim == 0 else (5, rows)
            whole = torch.arange(float(rows * 5)).view(shape)
            linear = nn.Linear(*shape[::-1], bias=False)
            part = whole.chunk(tp, dim)[mesh.get_local_rank("tp")].contiguous()
            linear.weight = nn.Parameter(DTensor.from_local(part, mesh["tp"], [Shard(dim)], run_check=False))
            fully_shard(linear, mesh=mesh["dp"])
            assert torch.equal(whole_tensor(linear.weight), whole)
            again = place_like(whole, linear.weight)
            assert isinstance(again, DTensor)
            assert torch.equal(again.to_local(), linear.weight.to_local())


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (4, 1), (1, 4)])
def test_weights_cut_by_both_axes_are_put_together_and_cut_again(ranks: RankPool, dp: int, tp: int) -> None:
    ranks(4, _sharded_again, dp, tp)


def test_the_whole_shape_is_that_of_one_process() -> None:
    assert Rows(1, 13, (*range(13), -1)).whole_shape((4, 14)) == (4, 13)

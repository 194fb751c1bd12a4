"""Traps 01, 02, 04, 05 and 22: one norm over gradients that lie on many ranks in many ways, each element once.

The axes that bring these layouts do not exist yet: meshes and parameters are made by hand.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_5d.gradients import clip_by_norm, clip_by_value, global_norm, global_norms, local_gradients
from lightning_5d.mesh import AXES, ParallelMesh
from tests.ranks import RankPool


def _mesh(**sizes: int) -> ParallelMesh:
    return ParallelMesh.create({axis: sizes.get(axis, 1) for axis in AXES}, "cpu")


def _with_grad(grad: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(grad))
    parameter.grad = grad
    return parameter


def _counted(function: Callable[[], Any]) -> tuple[Any, int]:
    """What a function returns, and how many all-reduces and all-gathers it started."""
    originals, calls = {name: getattr(dist, name) for name in ("all_reduce", "all_gather")}, 0

    def counting(original: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    for name, original in originals.items():
        setattr(dist, name, partial(counting, original))
    try:
        return function(), calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _tied(rank: int) -> tuple[float, float]:
    mesh = _mesh(pp=2)
    shared = _with_grad(torch.tensor([20.0, 20.0]))  # summed over both stages, so equal on both
    own = _with_grad(torch.tensor([3.0]) if rank == 0 else torch.tensor([4.0]))

    def axes(parameter: Tensor) -> Sequence[str] | None:
        return None if parameter is shared and mesh.rank("pp") == 1 else ("pp",)

    alone = global_norm([shared], mesh, extra_axes=axes)
    return float(alone), float(global_norm([shared, own], mesh, extra_axes=axes))


def test_01_a_tied_weight_with_an_owner_on_two_stages_counts_once(ranks: RankPool) -> None:
    for alone, together in ranks(2, _tied):
        assert alone == pytest.approx(28.284, abs=1e-3)  # not 40
        assert together == pytest.approx(math.sqrt(800 + 9 + 16))


def _stages(rank: int, empty: bool) -> tuple[float, list[float], int]:
    mesh = _mesh(pp=2)
    mine = [] if empty and rank == 1 else [_with_grad(torch.tensor([3.0 + rank]))]
    norm, calls = _counted(lambda: global_norm(mine, mesh, extra_axes=lambda _: ("pp",)))
    clip_by_norm(mine, 1.0, norm)
    return float(norm), [float(grad) for grad in local_gradients(mine)], calls


def test_02_stages_own_their_parts_of_one_norm(ranks: RankPool) -> None:
    (one, first, calls), (other, second, _) = ranks(2, _stages, False)
    assert one == other == 5.0
    assert first + second == pytest.approx([0.6, 0.8], abs=1e-5)  # not 1 and 1
    assert calls == 1


def test_02_a_stage_without_trained_weights_takes_part(ranks: RankPool) -> None:
    assert [result[0] for result in ranks(2, _stages, True)] == [3.0, 3.0]


def _experts(rank: int, frozen: bool) -> tuple[float, float, float]:
    mesh = _mesh(dp_shard=2)
    expert = _with_grad(torch.tensor([40.0] if rank == 0 else [4.0]))
    if frozen and rank == 1:
        expert.grad = None
    dense = _with_grad(distribute_tensor(torch.tensor([3.0, 0.0, 0.0, 4.0]), mesh.device_mesh, [Shard(0)]))
    norm = global_norm([expert, dense], mesh, extra_axes=lambda p: ("dp_shard",) if p is expert else ())
    clip_by_norm([expert, dense], 1.0, norm)
    local = dense.grad.to_local()  # type: ignore[union-attr]
    return float(norm), float(local.abs().max()), 0.0 if expert.grad is None else float(expert.grad)


def test_04_experts_and_dense_weights_share_one_norm(ranks: RankPool) -> None:
    norm = math.sqrt(40**2 + 4**2 + 5**2)
    first, second = ranks(2, _experts, False)
    assert first[0] == second[0] == pytest.approx(norm)
    assert first[1:] == pytest.approx((3 / norm, 40 / norm))
    assert second[1:] == pytest.approx((4 / norm, 4 / norm))


def test_04_a_rank_whose_experts_are_frozen_takes_part(ranks: RankPool) -> None:
    first, second = ranks(2, _experts, True)
    assert first[0] == second[0] == pytest.approx(math.sqrt(40**2 + 5**2))
    assert first[1] / 3 == pytest.approx(second[1] / 4)


def _mixed_meshes(rank: int) -> tuple[list[float], int, list[float]]:
    mesh = _mesh(dp_shard=2)
    by_dp, by_tp = (init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("dp", "tp"))
    sharded = [_with_grad(distribute_tensor(torch.ones(4, 2), m, [Shard(0)])) for m in (by_dp, by_tp)]
    everything = [*sharded, _with_grad(torch.ones(4, 2))]
    norms, calls = _counted(lambda: global_norms([sharded, everything, everything[2:]], mesh))
    clip_by_norm(iter(everything), 1.0, norms[1])
    return norms.tolist(), calls, [float(grad.flatten()[0]) for grad in local_gradients(everything)]


def test_05_different_meshes_and_plain_tensors_are_clipped_alike(ranks: RankPool) -> None:
    for norms, calls, grads in ranks(2, _mixed_meshes):
        assert norms == pytest.approx([4.0, 4.899, math.sqrt(8)], abs=1e-3)
        assert calls == 1  # for three norms
        assert grads == pytest.approx([1 / 4.899] * 3, abs=1e-3)


def _partial(rank: int) -> tuple[list[float], int, list[str], list[list[float]]]:
    mesh = _mesh(dp_shard=2, tp=2)
    tp = mesh.device_mesh["tp"]
    share = 0.25 if rank % 2 == 0 else 0.75  # of tp rank 0 and 1
    summed = _with_grad(DTensor.from_local(torch.full((8,), 4 * share), tp, [Partial()], run_check=False))
    mean = _with_grad(DTensor.from_local(torch.full((2,), 4 * share), tp, [Partial("avg")], run_check=False))
    norms, calls = _counted(lambda: global_norms([[summed], [mean]], mesh))
    placements = [str(parameter.grad.placements[0]) for parameter in (summed, mean)]  # type: ignore[union-attr]
    clip_by_value([summed, mean], 3.0)
    return norms.tolist(), calls, placements, [grad.tolist() for grad in local_gradients([summed, mean])]


def test_22_partial_sums_are_added_up_before_anything_is_read_from_them(ranks: RankPool) -> None:
    for norms, calls, placements, grads in ranks(4, _partial):
        assert norms == pytest.approx([math.sqrt(8 * 16), math.sqrt(2 * 4)])
        assert calls == 3  # one for the sums, one for the means, one for the norms
        assert placements == [str(Replicate())] * 2
        assert grads == [[3.0] * 8, [2.0] * 2]


def test_22_the_largest_of_parts_is_refused(ranks: RankPool) -> None:
    for message in ranks(2, _largest_of_parts):
        assert "only sums and means" in message


def _largest_of_parts(rank: int) -> str:
    mesh = _mesh(tp=2)
    parameter = _with_grad(DTensor.from_local(torch.ones(2), mesh.device_mesh["tp"], [Partial("max")], run_check=False))
    with pytest.raises(ValueError) as error:
        global_norm([parameter], mesh)
    return str(error.value)


def _layouts(rank: int) -> list[tuple[str, float, list[float], list[float]]]:
    """Every layout of one gradient over dp_shard x tp, and over dp_replicate x dp_shard, and what its norms are."""
    found = []
    whole = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))  # 6 over 4: pieces of 2, 2, 2 and 0 rows
    for sizes in ({"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}):
        mesh = _mesh(**sizes)
        outer, inner = (mesh.device_mesh[name] for name in sizes)
        flat = mesh.device_mesh._flatten("all")
        layouts: dict[str, Tensor] = {
            "plain": whole.clone(),
            "outer": distribute_tensor(whole, outer, [Shard(0)]),
            "inner": distribute_tensor(whole, inner, [Shard(1)]),
            "copies": distribute_tensor(whole, inner, [Replicate()]),
            "both": distribute_tensor(whole, mesh.device_mesh, [Shard(0), Shard(1)]),
            "hybrid": distribute_tensor(whole, mesh.device_mesh, [Replicate(), Shard(0)]),
            "flattened": distribute_tensor(whole, flat, [Shard(0)]),
            "strided": _strided(whole, mesh),
        }
        for name, grad in layouts.items():
            norms, expected = [], []
            for p in (1.0, 2.0, 3.0, math.inf):
                norms.append(float(global_norm([_with_grad(grad)], mesh, p)))
                expected.append(float(torch.linalg.vector_norm(whole.double(), p)))
            found.append((f"{name} over {' x '.join(sizes)}", float(rank), norms, expected))
    return found


def _strided(whole: Tensor, mesh: ParallelMesh) -> DTensor:
    """As FSDP2 places what tensor parallelism has cut along the same dimension before it."""
    half = whole.chunk(2)[mesh.rank(mesh.names[1])]
    local = half.chunk(2)[mesh.rank(mesh.names[0])]
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    return DTensor.from_local(
        local, mesh.device_mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def test_every_layout_has_the_norm_of_the_whole_gradient(ranks: RankPool) -> None:
    for found in ranks(4, _layouts):
        for name, _, norms, expected in found:
            assert norms == pytest.approx(expected, rel=1e-6), name


def _odd(rank: int) -> dict[str, Any]:
    mesh = _mesh(dp_shard=2)

    def sharded(*values: float) -> nn.Parameter:
        return _with_grad(distribute_tensor(torch.tensor(values), mesh.device_mesh, [Shard(0)]))

    last = math.nan, math.inf
    found: dict[str, Any] = {
        f"{bad} at {p}": float(global_norm([sharded(1.0, 2.0, 3.0, bad)], mesh, p))
        for bad in last
        for p in (2.0, math.inf)
    }
    found["both"] = float(global_norm([sharded(math.inf, 0.0, 0.0, math.nan)], mesh, math.inf))
    found["one element"] = float(global_norm([sharded(-7.0)], mesh, math.inf))  # rank 1 holds nothing
    found["nothing"] = float(global_norm([], mesh))
    half = _with_grad(torch.full((4,), 60000.0, dtype=torch.float16))
    double = _with_grad(torch.ones(1, dtype=torch.float64))
    found["half"] = float(global_norm([half, double, half], mesh))
    zero = sharded(0.0, 0.0)
    clip_by_norm([zero], 1.0, global_norm([zero], mesh))
    found["zero"] = local_gradients([zero])[0].tolist()
    return found


def test_norms_that_are_odd_are_the_same_on_all_ranks(ranks: RankPool) -> None:
    first, second = ranks(2, _odd)
    for found in (first, second):
        assert math.isnan(found["nan at 2.0"])
        assert math.isnan(found["nan at inf"])
        assert found["inf at 2.0"] == found["inf at inf"] == math.inf
        assert math.isnan(found["both"])
        assert found["one element"] == 7.0
        assert found["nothing"] == 0.0
        assert found["half"] == pytest.approx(math.sqrt(4 * 60000.0**2 + 1))  # beyond the range of fp16, and once
        assert found["zero"] == [0.0]


def test_bounds_of_clipping_have_one_meaning_each() -> None:
    def clipped(bound: float, by: str = "norm") -> list[float]:
        parameter = _with_grad(torch.tensor([3.0, -4.0]))
        if by == "norm":
            clip_by_norm([parameter], bound, global_norm([parameter]))
        else:
            clip_by_value([parameter], bound)
        return local_gradients([parameter])[0].tolist()

    assert clipped(0.0) == [0.0, 0.0]
    assert clipped(math.inf) == [3.0, -4.0]
    assert clipped(10.0) == [3.0, -4.0]
    assert clipped(0.0, "value") == [0.0, 0.0]
    assert clipped(3.5, "value") == [3.0, -3.5]
    assert clipped(math.inf, "value") == [3.0, -4.0]
    for by in ("norm", "value"):
        for bound in (-1.0, math.nan):
            with pytest.raises(ValueError, match=f"is {bound}; it must be 0 or larger"):
                clipped(bound, by)
    with pytest.raises(ValueError, match="norm_type is 0"):
        global_norm([], norm_type=0)


def test_an_infinite_norm_clips_as_torch_does() -> None:
    ours, theirs = (_with_grad(torch.tensor([1.0, math.inf])) for _ in range(2))
    clip_by_norm([ours], 1.0, global_norm([ours]))
    torch.nn.utils.clip_grad_norm_([theirs], 1.0)
    torch.testing.assert_close(ours.grad, theirs.grad, equal_nan=True)
    limited = _with_grad(torch.tensor([math.nan, math.inf]))
    clip_by_value([limited], 2.0)
    torch.testing.assert_close(limited.grad, torch.tensor([math.nan, 2.0]), equal_nan=True)


def test_sparse_complex_and_double_gradients_are_clipped() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 1, 2])).sum().backward()
    assert table.weight.grad is not None
    dense = table.weight.grad.to_dense()
    norm = global_norm(table.parameters())
    assert float(norm) == pytest.approx(float(dense.norm()))  # row 1 was added twice: 2, not twice 1
    clip_by_norm(table.parameters(), 1.0, norm)
    torch.testing.assert_close(table.weight.grad.to_dense(), dense / dense.norm())
    clip_by_value(table.parameters(), 0.5)
    assert float(table.weight.grad.to_dense().max()) == 0.5
    turned = _with_grad(torch.tensor([3.0 + 4.0j]))
    assert float(global_norm([turned])) == 5.0
    clip_by_norm([turned], 1.0, global_norm([turned]))
    assert complex(local_gradients([turned])[0]) == pytest.approx(0.6 + 0.8j)
    with pytest.raises(TypeError, match="complex"):
        clip_by_value([turned], 1.0)
    double = _with_grad(torch.tensor([1e200], dtype=torch.float64))
    assert float(global_norm([double])) == math.inf  # its square is beyond float64
    assert float(global_norm([double], norm_type=math.inf)) == 1e200


def test_spread_gradients_without_a_mesh_are_refused(ranks: RankPool) -> None:
    for message in ranks(2, _without_mesh):
        assert "spread over 2 ranks" in message
        assert "trainer.strategy.gradient_norm" in message


def _without_mesh(rank: int) -> str:
    mesh = _mesh(dp_shard=2)
    parameter = _with_grad(distribute_tensor(torch.ones(2), mesh.device_mesh, [Shard(0)]))
    with pytest.raises(ValueError) as error:
        global_norm([parameter])
    return str(error.value)

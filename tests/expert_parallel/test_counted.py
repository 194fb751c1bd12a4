"""What routers count over ranks is what one process counts: each token once, no padding, and gradients that do not know of the ranks."""

import copy
import pickle
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_5d.context_parallel.cut import SequenceCut
from lightning_5d.expert_parallel.counted import Counted
from lightning_5d.expert_parallel.counted_over import CountedOver
from lightning_5d.expert_parallel.dispatch import Capacity, Drop, kept_by_capacity
from lightning_5d.expert_parallel.row_ranks import RowRanks
from lightning_5d.mesh import AXES, ParallelMesh
from lightning_5d.tensor_parallel.host_axis import HostAxis
from tests.ranks.pool import RankPool

EXPERTS, TOP_K, HIDDEN, SEQUENCES = 4, 2, 3, 2


class Layout:
    """Ranks, and how they cut sequences of so many tokens, without the axes that would do so.

    Args:
        length: Tokens of a sequence.
        cp: Context ranks.
        tp: Tensor ranks.
        cuts: Whether the tensor ranks cut the sequence.
        data: Data ranks.
        is_open: Whether a door is open.
    """

    def __init__(self, length: int, cp: int, tp: int, cuts: bool, data: int = 1, is_open: bool = True) -> None:
        self.mesh = ParallelMesh.create(
            {**dict.fromkeys(AXES, 1), "dp_shard": data, "cp": cp, "tp": tp}, device_type="cpu"
        )
        self.length, self.cp, self.tp, self.is_open = length, cp, tp, is_open
        self.cut = SequenceCut(length, cp) if cp > 1 and is_open else None
        self.local = length if self.cut is None else self.cut.local
        self.door: Any = SimpleNamespace(sequence=SimpleNamespace(cut=self.cut), paused=False)
        self.block: Any = SimpleNamespace(inside=self.local) if cuts else None
        self.ranks = RowRanks(self.mesh, lambda: self.door if self.cut else None, self.block)

    def mine(self, whole: Tensor) -> Tensor:
        """This rank's rows (B * t, …) of (B, S, …), with nan as padding."""
        held = whole if self.cut is None else self.cut.part(whole, 1, self.mesh.rank("cp"), torch.nan)
        if self.block is not None:
            held = nn.functional.pad(held, (0, 0, 0, -self.local % self.tp), value=torch.nan)
            held = held.chunk(self.tp, 1)[self.mesh.rank("tp")]
        return held.flatten(0, 1)

    def leave(self) -> None:
        """Code goes on outside of doors and blocks."""
        self.cut = None
        if self.block is not None:
            self.block.inside = None

    def gradient(self, weight: nn.Parameter) -> Tensor:
        """What the axes make of the ranks' gradients: summands along the sequence of the tensor axis, else means."""
        total = weight.grad.clone()  # type: ignore[union-attr]
        dist.all_reduce(total)
        return total / (dist.get_world_size() / (self.tp if self.block is not None else 1))


def _losses(counted: Counted, weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    real = counted.real(len(rows))
    if real is not None:
        rows = torch.where(real[:, None], rows, 0)
    logits = rows @ weight.t()
    counts = torch.ones(len(rows), 1) if real is None else real[:, None].float()
    chosen = torch.zeros_like(logits).scatter(1, logits.topk(TOP_K).indices, 1.0) * counts
    load = counted.sum(chosen.sum(0), "global")
    sums = counted.sum_of_microbatch(
        torch.cat([logits.softmax(-1) * counts, logits.logsumexp(-1, keepdim=True).square() * counts, counts], 1).sum(0)
    )
    tokens = sums[-1].detach()
    balance = EXPERTS * (load / load.sum() * sums[:EXPERTS] / tokens).sum()
    return balance + 0.1 * sums[EXPERTS] / tokens, load


def _microbatches(length: int, data: int) -> tuple[Tensor, nn.Parameter]:
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(data, SEQUENCES, length, HIDDEN, generator=generator)
    return x, nn.Parameter(torch.randn(EXPERTS, HIDDEN, generator=generator))


def _balance(rank: int, length: int, settings: dict[str, Any]) -> tuple[float, Tensor, Tensor]:
    layout = Layout(length, **settings)
    x, weight = _microbatches(length, layout.mesh.size("dp_shard"))
    counted = CountedOver(layout.ranks)
    loss, load = _losses(counted, weight, layout.mine(x[layout.mesh.rank("dp_shard")]))
    loss.backward()
    assert not load.requires_grad
    gradient = layout.gradient(weight)
    mean = loss.detach().clone()  # the same on all ranks of a microbatch
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    layout.ranks.close()
    return loss.item(), gradient, torch.stack([mean, load.sum()])


LAYOUTS = {
    "cp": {"cp": 2, "tp": 1, "cuts": False},
    "cp, door closed": {"cp": 2, "tp": 1, "cuts": False, "is_open": False},
    "tp": {"cp": 1, "tp": 2, "cuts": False},
    "tp+sp": {"cp": 1, "tp": 2, "cuts": True},
    "cp x tp": {"cp": 2, "tp": 2, "cuts": False},
    "cp x tp+sp": {"cp": 2, "tp": 2, "cuts": True},
    "closed cp x tp+sp": {"cp": 2, "tp": 2, "cuts": True, "is_open": False},
    "dp x cp": {"cp": 2, "tp": 1, "cuts": False, "data": 2},
    "dp x tp+sp": {"cp": 1, "tp": 2, "cuts": True, "data": 2},
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("length", [8, 7])
def test_router_losses_and_gradients_are_those_of_one_process(ranks: RankPool, name: str, length: int) -> None:
    settings = LAYOUTS[name]
    data = settings.get("data", 1)
    found = ranks(settings["cp"] * settings["tp"] * data, _balance, length, settings, backend="gloo", timeout=30)
    x, weight = _microbatches(length, data)
    whole, _ = _losses(Counted(), weight, x.flatten(0, 2))
    # P is linear in the microbatches, and f is that of all of them; so the mean of their losses is the loss of the whole batch.
    whole.backward()
    assert len({loss for loss, _, _ in found[: len(found) // data]}) == 1, (
        "not the same bits on all ranks of a microbatch"
    )
    for _, gradient, sums in found:
        torch.testing.assert_close(gradient, weight.grad, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(sums[0], whole.detach(), rtol=1e-5, atol=1e-6)
        assert sums[1] == data * SEQUENCES * length * TOP_K


def _later(rank: int, settings: dict[str, Any]) -> list[float]:
    layout = Layout(7, **settings)
    counted = CountedOver(layout.ranks)
    rows = layout.mine(torch.ones(SEQUENCES, 7, 1))
    real = counted.real(len(rows))
    load = torch.tensor(len(rows) if real is None else int(real.sum()))
    layout.leave()
    assert layout.ranks.rows is None
    sums = [counted.sum(load, "microbatch"), counted.sum(load, "global")]
    with layout.ranks.apart():
        sums.append(counted.sum(load, "global"))
    layout.ranks.close()
    return [float(x) for x in sums]


@pytest.mark.parametrize("name", ["cp x tp+sp", "dp x cp", "tp", "cp x tp"])
def test_a_load_is_summed_behind_the_step_over_the_ranks_that_counted_it(ranks: RankPool, name: str) -> None:
    settings = LAYOUTS[name]
    data = settings.get("data", 1)
    tokens = SEQUENCES * 7
    found = ranks(settings["cp"] * settings["tp"] * data, _later, settings, backend="gloo", timeout=30)
    assert found == [[tokens, data * tokens, tokens]] * len(found)


def _decide(rank: int, settings: dict[str, Any], drop: Drop) -> None:
    layout = Layout(7, **settings)
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(SEQUENCES, 7, EXPERTS, generator=generator)
    scores[..., 1] += 0.5
    weights, index = scores.topk(TOP_K)
    capacity = Capacity(0.75, drop)
    wanted = kept_by_capacity(index.flatten(0, 1), weights.flatten(0, 1), EXPERTS, capacity)
    assert 0 < int(wanted.sum()) < wanted.numel()
    mine = layout.mine(index.float()).nan_to_num(3).long(), layout.mine(weights).nan_to_num(100.0)
    whole = layout.ranks.choices(*mine)
    torch.testing.assert_close(whole[0], index.flatten(0, 1))
    torch.testing.assert_close(whole[1], weights.flatten(0, 1), rtol=0, atol=0)
    kept = layout.ranks.kept(*mine, partial(kept_by_capacity, experts=EXPERTS, capacity=capacity))
    expected = layout.mine(wanted.unflatten(0, (SEQUENCES, 7)).float()).nan_to_num(0).bool()
    torch.testing.assert_close(kept, expected)
    tokens = layout.mine(torch.ones(SEQUENCES, 7, TOP_K)).nan_to_num(0).bool()
    without_limit = layout.ranks.kept(*mine, None)
    assert tokens.all() if without_limit is None else bool((without_limit == tokens).all())
    layout.ranks.close()


@pytest.mark.parametrize("drop", ["probability", "position"])
@pytest.mark.parametrize("name", ["cp", "cp, door closed", "tp", "tp+sp", "cp x tp", "cp x tp+sp", "closed cp x tp+sp"])
def test_ranks_of_a_microbatch_leave_out_what_one_process_would(ranks: RankPool, name: str, drop: Drop) -> None:
    settings = LAYOUTS[name]
    ranks(settings["cp"] * settings["tp"], _decide, settings, drop, backend="gloo", timeout=30)


def _copies(rank: int) -> None:
    layout = Layout(8, 1, 1, cuts=False)
    counted = CountedOver(layout.ranks)
    assert type(copy.deepcopy(counted)) is Counted
    assert type(pickle.loads(pickle.dumps(counted))) is Counted


def _unequal(rank: int) -> str:
    mesh = ParallelMesh.create({**dict.fromkeys(AXES, 1), "dp_shard": 2}, "cpu")
    ranks, said = RowRanks(mesh), ""
    if rank == 0:
        (axis,) = ranks._axes
        assert isinstance(axis, HostAxis)
        axis._host._timeout_s = 1.0
        with pytest.raises(RuntimeError) as error:
            ranks.sum(torch.ones(EXPERTS), "global")
        said = "\n".join([str(error.value), *error.value.__notes__])
    dist.barrier()
    ranks.close()
    return said


def test_a_rank_that_calls_routers_less_often_than_others_is_told_of_them(ranks: RankPool) -> None:
    said = ranks(2, _unequal, timeout=30)[0]
    assert "has waited 1 s for rank 1 of the group of routers" in said
    assert "have to call the layers with experts equally often, in one order" in said


def test_a_copy_of_a_module_counts_by_itself(ranks: RankPool) -> None:
    ranks(1, _copies, backend="gloo", timeout=30)

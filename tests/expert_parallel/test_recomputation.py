"""Layers with experts whose forwards backward runs again."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_5d import FiveD, ParallelPlan, PipelineParallel, ZeRO
from lightning_5d.activation_checkpointing import ActivationCheckpointing, Checkpointed
from lightning_5d.parallelism import Parallelized
from tests.expert_parallel.by_hand import AllToAll, Model, Sending
from tests.expert_parallel.in_stages import compare_settings
from tests.ranks.pool import RankPool

MICROBATCHES = 4
MODES: dict[str, Any] = {
    "full": "full",
    "selective": "selective",
    "half": 0.5,
    "experts": ActivationCheckpointing(modules=("*.experts",)),
    "every": ActivationCheckpointing(every=2),
}


def _strategy(schedule: str, checkpointing: Any = None) -> Any:
    pipeline = PipelineParallel(2, schedule=schedule, microbatches=MICROBATCHES)
    return partial(FiveD, pipeline, Sending(), ZeRO(stage=2), activation_checkpointing=checkpointing)


@pytest.mark.parametrize("modes", [["full", "selective", "experts", "every"], ["half"]])
def test_every_mode_sends_in_one_order_and_counts_once(ranks: RankPool, modes: list[str]) -> None:
    strategies = {f"{mode} {name}": _strategy(name, MODES[mode]) for mode in modes for name in ("1f1b", "zb_v")}
    compare_settings(ranks, 4, Model, strategies, microbatches=MICROBATCHES)


@pytest.mark.parametrize("reentrant", [False])
def test_what_users_run_again_themselves(ranks: RankPool, reentrant: bool) -> None:
    strategies = {name: _strategy(name) for name in ("1f1b", "zb_v")}
    compare_settings(ranks, 4, partial(Model, checkpointed=reentrant), strategies, microbatches=MICROBATCHES)


class Uneven(nn.Module):
    """Saves more on one rank than on the other."""

    def forward(self, x: Tensor) -> Tensor:
        copies = 8 if dist.get_rank() else 1
        return x.expand(copies, *x.shape).sin().cos().sum(0)


class Meeting(nn.Module):
    """Waits for the others."""

    def forward(self, x: Tensor) -> Tensor:
        rows = [len(x) // 2] * 2
        return AllToAll.apply(x.sin().cos(), rows, rows, None).sin().cos()


class Together(Parallelized):
    """Says that both ranks wait for each other."""

    def recomputing_together(self) -> Any:
        return dist.group.WORLD


def _uneven(rank: int, share: float) -> list[str]:
    root = nn.ModuleDict({"blocks": nn.ModuleList([Uneven(), Meeting()])})
    options = ActivationCheckpointing(mode="budget", memory_budget=share, modules=("blocks.*",))
    checkpointed = Checkpointed(root, options, ParallelPlan())
    checkpointed.all_at_work([checkpointed, Together()])
    AllToAll.calls.clear()
    x = torch.ones(4, 3, requires_grad=True)
    for _ in range(2):
        y = x
        for block in root["blocks"]:
            y = block(y)
        y.sum().backward()
    return list(AllToAll.calls)


def test_ranks_that_wait_for_each_other_keep_alike_under_a_budget(ranks: RankPool) -> None:
    first, second = ranks(2, partial(_uneven, share=0.5), backend="gloo", timeout=20.0)
    assert first == second

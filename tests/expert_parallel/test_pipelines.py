"""Layers with experts in stages of a pipeline: every schedule, with balance losses of all stages."""

from functools import partial
from typing import Any

from lightning_5d import FiveD, PipelineParallel, ZeRO
from lightning_5d.pipeline_parallel import SCHEDULES
from tests.expert_parallel.by_hand import Model, Sending
from tests.expert_parallel.in_stages import compare_settings
from tests.ranks.pool import RankPool

MICROBATCHES = 4


def _pipeline(name: str, **options: Any) -> PipelineParallel:
    chunks: dict[str, Any] = {"chunks": 2} if SCHEDULES[name].chunks is None else {}
    return PipelineParallel(2, schedule=name, microbatches=MICROBATCHES, **chunks, **options)


def test_every_schedule_carries_balance_losses_and_gradients_of_routers(ranks: RankPool) -> None:
    strategies = {
        name: partial(FiveD, _pipeline(name), Sending(), ZeRO(stage=1)) for name in SCHEDULES if "dualpipe" not in name
    }
    compare_settings(ranks, 4, partial(Model, running=True), strategies, microbatches=MICROBATCHES)


def test_ranks_that_hold_a_stage_twice_count_together(ranks: RankPool) -> None:
    names = ["dualpipe", "dualpipe_v"]
    strategies = {name: partial(FiveD, _pipeline(name), Sending(), ZeRO(stage=1)) for name in names}
    compare_settings(ranks, 4, partial(Model, running=False), strategies, microbatches=MICROBATCHES)

"""Layers with experts in stages of a pipeline: every schedule, with balance losses of all stages."""

from functools import partial
from typing import Any

from lightning_5d import ExpertParallel, FiveD, PipelineParallel, ZeRO
from lightning_5d.pipeline_parallel import SCHEDULES
from tests.expert_parallel.in_stages import compare_settings, sparse
from tests.ranks.pool import RankPool

MICROBATCHES = 4


def _strategy(name: str, *others: Any, **options: Any) -> Any:
    chunks: dict[str, Any] = {"chunks": 2} if SCHEDULES.get(name) and SCHEDULES[name].chunks is None else {}
    pipeline = PipelineParallel(2, schedule=name, microbatches=MICROBATCHES, **chunks, **options)
    return partial(FiveD, pipeline, ExpertParallel(2), *others)


def test_every_schedule_carries_balance_losses_and_gradients_of_routers(ranks: RankPool) -> None:
    names = [name for name in SCHEDULES if name != "dualpipe"]
    strategies = {name: _strategy(name, ZeRO(stage=index % 4)) for index, name in enumerate(names)}
    compare_settings(ranks, 4, sparse(), strategies, microbatches=MICROBATCHES)


def test_ranks_that_hold_a_stage_twice_count_together(ranks: RankPool) -> None:
    # Each direction has a part of the microbatches: the choices so far in a step are those of a direction, and in one process of all.
    strategies = {f"{stage}": _strategy("dualpipe", ZeRO(stage=stage)) for stage in (1, 2)}
    compare_settings(ranks, 4, sparse(balance_scope="sequence"), strategies, microbatches=MICROBATCHES)

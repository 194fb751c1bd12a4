"""Layers with experts in stages of a pipeline: every schedule, with balance losses of all stages."""

from functools import partial
from typing import Any

import pytest
import torch

from lightning_5d import ExpertParallel, FiveD, PipelineParallel, ZeRO
from lightning_5d.callbacks.expert_load import ExpertLoad
from lightning_5d.pipeline_parallel import SCHEDULES
from tests.expert_parallel.in_stages import compare_settings, sparse
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, Dealt, Rows
from tests.trainers import quiet

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


def _post_validated(rank: int, post_validation: bool, bound: float) -> dict[str, Any]:
    strategy = _strategy("zb_h1", ZeRO(stage=1), post_validation=post_validation)()
    loads = ExpertLoad(every_n_steps=1, chart=False)
    trainer = quiet(
        strategy=strategy, devices=4, use_distributed_sampler=False, gradient_clip_val=bound, callbacks=[loads]
    )
    module = sparse()()
    trainer.fit(module, datamodule=Dealt(Rows(64, 6), 16))
    return {
        "tensors": {name: getattr(t, "_local_tensor", t).clone() for name, t in module.state_dict().items()},
        "loads": [
            {name: load.tokens_E.tolist() for name, load in each.loads.items()} for each in loads.history.columns
        ],
        "redone": strategy._post.steps_redone if strategy._post is not None else 0,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


@pytest.mark.parametrize(("bound", "redone"), [(0.5, 3), (1e3, 0)])
def test_biases_and_loads_are_those_of_steps_that_wait(ranks: RankPool, bound: float, redone: int) -> None:
    waiting, optimistic = (
        ranks(4, partial(_post_validated, post_validation=each, bound=bound), **SEPARATE) for each in (False, True)
    )
    for one, other in zip(waiting, optimistic, strict=True):
        assert other["redone"] == redone
        assert one["tensors"].keys() == other["tensors"].keys()
        assert all(torch.equal(one["tensors"][name], other["tensors"][name]) for name in one["tensors"])
        assert one["loads"] == other["loads"] and len(one["loads"]) == 4
        assert one["metrics"] == other["metrics"]

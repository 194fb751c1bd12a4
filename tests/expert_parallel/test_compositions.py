"""Experts together with stages, replicas, accumulation, recomputation, capacity and double precision."""

from typing import Any

import pytest

from lightning_5d import ContextParallel, ExpertParallel, PipelineParallel, TensorParallel, ZeRO
from tests.expert_parallel.test_training import mixture
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import compare


def even(**changes: Any) -> Any:
    """Without a balance loss, which is another one for each microbatch."""
    return mixture(**{"balance": 0.0, **changes})


def test_stages_with_experts(ranks: RankPool) -> None:
    compare(ranks, even(), ExpertParallel(2), PipelineParallel(2, microbatches=2), world=4)


def test_four_axes_of_two_ranks(ranks: RankPool) -> None:
    plugins = PipelineParallel(2, microbatches=2), TensorParallel(2, sequence_parallel=True), ContextParallel(2)
    compare(ranks, even(shared=1), ExpertParallel(4), ZeRO(stage=3), *plugins, world=16, tokens=8)


@pytest.mark.parametrize("stage", [1, 3])
def test_replicas_of_experts(ranks: RankPool, stage: int) -> None:
    compare(ranks, mixture(), ExpertParallel(2), ZeRO(stage=stage, replicate=2), world=8, batch=8)


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_of_several_batches(ranks: RankPool, stage: int) -> None:
    compare(ranks, even(), ExpertParallel(2), ZeRO(stage=stage), world=4, accumulate_grad_batches=2)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_layers_that_run_again(ranks: RankPool, mode: str) -> None:
    compare(ranks, mixture(shared=1), ExpertParallel(2), world=2, strategy={"activation_checkpointing": mode})


def test_double_precision(ranks: RankPool) -> None:
    compare(ranks, mixture(), ExpertParallel(2), world=2, precision="64-true", tolerance=1e-10)

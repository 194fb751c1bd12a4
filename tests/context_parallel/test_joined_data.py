"""Ranks of the context axis join the data ranks: ZeRO shards and averages over both, everything else goes by data ranks."""

from functools import partial
from typing import Any

import pytest

from lightning_5d import PipelineParallel, TensorParallel, ZeRO
from tests.context_parallel.standing_in import RowsApart
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import compare, decoder


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_with_two_data_ranks(ranks: RankPool, stage: int) -> None:
    compare(ranks, decoder(), RowsApart(2), ZeRO(stage=stage), world=4, accumulate_grad_batches=2)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_one_data_rank(ranks: RankPool, stage: int) -> None:
    compare(ranks, decoder(), RowsApart(2), ZeRO(stage=stage), world=2)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_hybrid(ranks: RankPool, stage: int) -> None:
    compare(ranks, decoder(), RowsApart(2), ZeRO(stage=stage, replicate=2), world=8, rows=32, batch=8)


def test_replicas_of_context_ranks_alone(ranks: RankPool) -> None:
    compare(ranks, decoder(), RowsApart(2), ZeRO(stage=2, replicate=2), world=4)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_tensor_axis(ranks: RankPool, stage: int) -> None:
    compare(ranks, decoder(), RowsApart(2), TensorParallel(2), ZeRO(stage=stage), world=8)

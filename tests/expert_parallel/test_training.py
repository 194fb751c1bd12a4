"""A Trainer whose ranks hold different experts trains as one process: losses, every gradient, norms, parameters after four steps."""

from collections.abc import Callable
from typing import Any

import pytest

from lightning_5d import ContextParallel, ExpertParallel, TensorParallel, ZeRO
from lightning_5d.models import LanguageModel
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import compare, decoder


def mixture(**changes: Any) -> Callable[[], LanguageModel]:
    """The reference decoder with four experts in each block."""
    moe = {"experts": 4, "top_k": 2, "intermediate_size": 12, "balance": 0.1, "z": 0.01, **changes}
    return decoder(moe=moe)


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_has_other_experts(ranks: RankPool, size: int) -> None:
    compare(ranks, mixture(), ExpertParallel(size), world=size)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_experts_are_sharded_over_ranks_that_have_the_same(ranks: RankPool, stage: int) -> None:
    compare(ranks, mixture(shared=1), ExpertParallel(2), ZeRO(stage=stage), world=4)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_tensor_ranks_hold_experts_too(ranks: RankPool, size: int, sequence: bool) -> None:
    plugins = ExpertParallel(size), TensorParallel(2, sequence_parallel=sequence)
    compare(ranks, mixture(shared=1), *plugins, world=4, tokens=7)


@pytest.mark.parametrize("sequence", [False, True])
def test_experts_are_cut_over_tensor_ranks(ranks: RankPool, sequence: bool) -> None:
    plugins = ExpertParallel(2, tensor=2), TensorParallel(2, sequence_parallel=sequence)
    compare(ranks, mixture(shared=1), *plugins, world=4, tokens=7)


@pytest.mark.parametrize("size", [2, 4])
def test_context_ranks_hold_experts_too(ranks: RankPool, size: int) -> None:
    compare(ranks, mixture(shared=1), ExpertParallel(size), ContextParallel(2), world=4, tokens=7)

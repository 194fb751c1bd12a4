"""Experts whose sequences several axes cut train as in one process: losses of routers, what is left out, gradients (trap 55)."""

from functools import partial
from typing import Any

import pytest

from lightning_5d import ContextParallel, ExpertParallel, FiveD, PipelineParallel, TensorParallel, ZeRO
from tests.context_parallel.test_training import uneven
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, apart, compare, decoder, fit

MOE: dict[str, Any] = {
    "experts": 4,
    "top_k": 2,
    "intermediate_size": 8,
    "shared": 1,
    "balance": 0.05,
    "z": 0.02,
    "bias_rate": 0.01,
}


def model(**changes: Any) -> Any:
    return decoder(moe={**MOE, **changes}, dense_layers=1, num_layers=3)


CUTS = ContextParallel(2), TensorParallel(2, sequence_parallel=True)

# Seven tokens: with padding on both axes. Labels that count are unevenly spread over the ranks.
DATA = partial(uneven, tokens=7)


@pytest.mark.parametrize(
    "experts", [(), (ExpertParallel(4),), (ExpertParallel(2, tensor=2),)], ids=["on all", "ep=4", "ep=2, etp=2"]
)
def test_a_sequence_that_two_axes_cut(ranks: RankPool, experts: tuple[Any, ...]) -> None:
    compare(ranks, model(), *experts, *CUTS, world=4, data=DATA)


def test_context_and_data_ranks_balance_together(ranks: RankPool) -> None:
    compare(ranks, model(), ContextParallel(2), ZeRO(stage=2), world=4, tokens=7)


def test_losses_of_an_early_stage_come_back_through_doors(ranks: RankPool) -> None:
    # Without a balance loss, whose shares of the whole batch a microbatch does not know. Adam makes more of a small gradient's rounding.
    plugins = PipelineParallel(2, microbatches=2), ContextParallel(2)
    compare(ranks, model(balance=0.0), *plugins, world=4, tokens=7, tolerance=5e-5)


def test_recomputed_blocks_know_what_they_have_of_each_sequence(ranks: RankPool) -> None:
    strategy = {"activation_checkpointing": "full"}
    compare(ranks, model(balance_scope="sequence"), CUTS[1], world=2, data=DATA, strategy=strategy)


@pytest.mark.parametrize("drop", ["probability", "position"])
def test_what_is_left_out_does_not_depend_on_ranks(ranks: RankPool, drop: Any) -> None:
    common: dict[str, Any] = {"gradient_clip_val": 0.5, "limit_val_batches": 0}

    def run(world: int, size: int, *plugins: Any) -> list[dict[str, Any]]:
        strategy = partial(FiveD, ExpertParallel(size, capacity_factor=0.75, drop=drop), *plugins)
        train = partial(fit, module=model(), data=DATA, strategy=strategy, devices=world)
        found: list[dict[str, Any]] = ranks(world, partial(train, **common), **SEPARATE)
        return found

    alone = run(1, 1)[0]
    differences = apart(run(4, 4, *CUTS), alone, 1e-6)
    assert max(differences.values()) < 1e-5, differences
    dropless = fit(0, model(), DATA, None, **common)
    assert alone["losses"] != dropless["losses"]

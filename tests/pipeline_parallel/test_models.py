"""Models as people bring them train on stages as in one process."""

from functools import partial
from typing import Any

import pytest

pytest.importorskip("transformers")

from lightning_5d import FiveD, PipelineParallel, ZeRO
from tests.pipeline_parallel.recorded import fit, fit_alone, rows, worst
from tests.pipeline_parallel.zoo import MODELS, TIED, FrozenStart, HeadOnly, deal, text
from tests.ranks.pool import RankPool

# Attention does not change when the same is added to all keys, so the gradients of their biases are rounding alone.
FLOORS = {"BERT": 1e-3, "ViT": 1e-3}
SEPARATE: dict[str, Any] = {"backend": None, "timeout": 60.0}


def compare(
    ranks: RankPool,
    module: Any,
    data: Any,
    *plugins: Any,
    world: int = 2,
    data_ranks: int = 1,
    tolerance: float = 1e-5,
    floor: float = 1e-12,
    **arguments: Any,
) -> None:
    call = partial(fit, module=module, data=data, strategy=partial(FiveD, *plugins), ranks=world, data_ranks=data_ranks)
    found = ranks(world, partial(call, gradient_clip_val=0.5, **arguments), **SEPARATE)
    differences = worst(found, fit_alone(module, data, gradient_clip_val=0.5, **arguments), floor)
    assert max(differences.values()) < tolerance, differences


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_in_one_process(ranks: RankPool, name: str) -> None:
    module, rows = MODELS[name]
    pipeline = PipelineParallel(2, microbatches=4)
    compare(ranks, module, partial(deal, rows), pipeline, floor=FLOORS.get(name, 1e-12))


@pytest.mark.parametrize("name", TIED)
def test_a_model_with_tied_weights_trains_as_in_one_process(ranks: RankPool, name: str) -> None:
    compare(ranks, TIED[name], partial(deal, text), PipelineParallel(2, microbatches=4))


def test_every_row_meets_its_own_mask_on_four_stages(ranks: RankPool) -> None:
    module, masked = MODELS["BERT"]
    compare(ranks, module, partial(deal, masked), PipelineParallel(4, microbatches=8), world=4, floor=FLOORS["BERT"])


@pytest.mark.parametrize("module", [HeadOnly, FrozenStart])
@pytest.mark.parametrize("stage", [0, 1])
def test_stages_without_trained_weights_step_with_the_others(ranks: RankPool, module: Any, stage: int) -> None:
    pipeline = PipelineParallel(2, microbatches=4, split=[2, 2])
    data = partial(rows, 16, 8)
    compare(ranks, module, data, pipeline, ZeRO(stage=stage), world=4, data_ranks=2)

"""Clipping and norms by torch's and Lightning's own functions give the numbers of one process over stages."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch.nn.utils import clip_grad_norm_, get_total_norm

from lightning_5d import ContextParallel, ExpertParallel, FiveD, PipelineParallel, TensorParallel, ZeRO
from lightning_5d.models import DecoderConfig
from tests.pipeline_parallel.clipped import KINDS, AfterBackward, Clipped, Everywhere, Steep, smallest_change
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, SIZES, Dealt, Rows, _worst, apart
from tests.trainers import quiet

MOE = {"experts": 4, "top_k": 2, "intermediate_size": 12, "balance": 0.0}
PLAIN: dict[str, Any] = {"num_layers": 3}
TIED: dict[str, Any] = {"num_layers": 4, "tie_embeddings": True}
SMALL: dict[str, Any] = {"num_layers": 2}
SMALL_TIED: dict[str, Any] = {"num_layers": 2, "tie_embeddings": True}
MIXTURE: dict[str, Any] = {"num_layers": 2, "moe": MOE}


def _module(kind: type[Steep], changes: dict[str, Any]) -> Steep:
    torch.manual_seed(0)
    return kind(DecoderConfig(**{**SIZES, **changes}))


def _runs(rank: int, strategy: Callable[[], FiveD] | None, world: int, changes: dict[str, Any]) -> list[Any]:
    found = []
    for kind in KINDS:
        record = Clipped()
        chosen: dict[str, Any] = {} if strategy is None else {"strategy": strategy()}
        trainer = quiet(callbacks=[record], use_distributed_sampler=False, devices=world, precision="64-true", **chosen)
        trainer.fit(_module(kind, changes), datamodule=Dealt(Rows(32, 6), 8))
        found.append({**record(), "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()}})
    return found


def _stages(*plugins: Any, schedule: str = "1f1b", microbatches: int = 2, **options: Any) -> Callable[[], FiveD]:
    return partial(FiveD, PipelineParallel(2, schedule=schedule, microbatches=microbatches, **options), *plugins)


LAYOUTS: dict[str, tuple[Callable[[], FiveD], int, dict[str, Any]]] = {
    "plain": (_stages(), 2, PLAIN),
    "tied": (_stages(schedule="zb_h1"), 2, SMALL_TIED),
    "v-shaped and tied": (_stages(schedule="zb_v"), 2, TIED),
    "two directions": (_stages(schedule="dualpipe", microbatches=4), 2, TIED),
    "post-validation": (_stages(schedule="zb_h1", post_validation=True), 2, SMALL_TIED),
    **{f"zero{stage}": (_stages(ZeRO(stage=stage)), 4, SMALL_TIED if stage % 2 else SMALL) for stage in range(4)},
    "tensor": (_stages(TensorParallel(2)), 4, SMALL_TIED),
    "context": (_stages(ContextParallel(2), ZeRO(stage=1)), 4, SMALL_TIED),
    "experts": (_stages(ExpertParallel(2)), 4, MIXTURE),
    "experts and zero3": (_stages(ExpertParallel(2), ZeRO(stage=3)), 4, MIXTURE),
}


class Alone:
    """Runs in one process, each made once."""

    def __init__(self) -> None:
        self._made: dict[str, list[Any]] = {}

    def __call__(self, changes: dict[str, Any]) -> list[Any]:
        if str(changes) not in self._made:
            self._made[str(changes)] = _runs(0, None, 1, changes)
        return self._made[str(changes)]


@pytest.fixture(scope="module")
def alone() -> Alone:
    return Alone()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_are_those_of_one_process(ranks: RankPool, alone: Alone, layout: str) -> None:
    strategy, world, changes = LAYOUTS[layout]
    right = alone(changes)
    found = ranks(world, _runs, strategy, world, changes, **SEPARATE)
    for index, (kind, expected) in enumerate(zip(KINDS, right, strict=True)):
        runs = [each[index] for each in found]
        differences = apart(runs, expected, 1e-6)
        differences["clipped"] = max(
            _worst(got, wanted, 1e-6) for got, wanted in zip(runs[0]["clipped"], expected["clipped"], strict=True)
        )
        assert max(differences.values()) < 1e-9, (kind, differences)
        for run in runs:
            assert run["metrics"] == pytest.approx(expected["metrics"], rel=1e-6), kind
    everywhere = right[KINDS.index(Everywhere)]["metrics"]
    assert everywhere["norm"] > 1.1 * everywhere["norm after"]
    assert smallest_change(right) > 1e-3, "a step was not clipped"


def _optimistic(rank: int, strategy: Callable[[], FiveD] | None, world: int) -> tuple[list[float], dict[str, Any]]:
    record = Clipped()
    chosen: dict[str, Any] = {} if strategy is None else {"strategy": strategy()}
    trainer = quiet(devices=world, use_distributed_sampler=False, gradient_clip_val=0.5, callbacks=[], **chosen)
    module = _module(AfterBackward, SMALL)
    trainer.fit(module, datamodule=Dealt(Rows(32, 6), 8))
    weights = record.kept(trainer, dict(module.named_parameters()))
    return [float(trainer.callback_metrics[name]) for name in ("norm", "norm after", "train_loss")], weights


def test_steps_that_do_not_wait_are_clipped_after_backward(ranks: RankPool) -> None:
    right, weights = _optimistic(0, None, 1)
    found = ranks(2, _optimistic, _stages(schedule="zb_h1", post_validation=True), 2, **SEPARATE)
    for numbers, _ in found:
        assert numbers == pytest.approx(right, rel=1e-5)
    assert _worst(found[0][1], weights, 1e-6) < 1e-5


def _left(rank: int) -> list[bool]:
    before = (
        clip_grad_norm_.__closure__[0].cell_contents,
        grad_norm.__code__,
        get_total_norm.__closure__[0].cell_contents,
    )  # type: ignore[attr-defined]
    quiet(strategy=_stages()(), devices=2, max_steps=1).fit(_module(KINDS[0], PLAIN), datamodule=Dealt(Rows(8, 6), 8))
    after = (
        clip_grad_norm_.__closure__[0].cell_contents,
        grad_norm.__code__,
        get_total_norm.__closure__[0].cell_contents,
    )  # type: ignore[attr-defined]
    return [a is b for a, b in zip(before, after, strict=True)]


def test_after_training_functions_are_their_own_again(ranks: RankPool) -> None:
    assert ranks(2, _left, **SEPARATE) == [[True] * 3] * 2

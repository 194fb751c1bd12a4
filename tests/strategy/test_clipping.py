"""Clipping through Lightning's own ways: one norm, of final gradients, in one collective."""

import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_5d.callbacks import GradientClipping
from lightning_5d.gradients import local_gradients
from tests.modules import TinyLM
from tests.ranks import RankPool
from tests.strategy.test_trainer import Data
from tests.trainers import quiet, whole, zero
from tests.traps.replicas import STAGES, TRAINER

ALONE = {**TRAINER, "env": {"WORLD_SIZE": None}}


class Steep(TinyLM):
    """Gradients so large that clipping decides every step, and plain SGD, which does not hide it as Adam would."""

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) * 50

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Overridden(Steep):
    """Clips twice: by value, then by norm."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="value")
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class ByHand(Steep):
    """Manual optimization, clipped by Lightning's method or by torch's functions, with weights of the module's own."""

    def __init__(self, clip: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.clip = clip
        self.tilt = torch.nn.Parameter(torch.linspace(-1, 1, 13))
        self.gain = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.gain + self.tilt

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        if self.clip == "torch norm":
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        elif self.clip == "torch inf-norm":
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1, norm_type=float("inf"))
        elif self.clip == "torch value":
            torch.nn.utils.clip_grad_value_(self.parameters(), 0.01)
        elif self.clip == "replaced":
            for parameter in self.parameters():
                parameter.grad = parameter.grad * 0.01 if parameter is not self.tilt else None  # type: ignore[operator]
        else:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()


NORM = {"gradient_clip_val": 0.1}
VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
HAND = ("lightning", "torch norm", "torch inf-norm", "torch value", "replaced")


def _fits(rank: int, stage: int | None, ranks: int, replicate: int) -> dict[str, dict[str, Tensor]]:
    cases: dict[str, tuple[Steep, dict[str, Any]]] = {
        "norm": (Steep(), NORM),
        "value": (Steep(), VALUE),
        "override": (Overridden(), {}),
        **{clip: (ByHand(clip), {}) for clip in HAND},
    }
    found = {}
    for name, (module, flags) in cases.items():
        (quiet(**flags) if stage is None else zero(stage, ranks, replicate, **flags)).fit(module, Data())
        found[name] = whole(module)
    return found


@pytest.fixture(scope="module")
def alone(rank_pool: RankPool) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = rank_pool(1, _fits, None, 1, 1, **ALONE)[0]
    return found


@pytest.mark.parametrize(("world", "replicate"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("stage", STAGES)
def test_every_way_to_clip_equals_one_process(
    ranks: RankPool, alone: dict[str, dict[str, Tensor]], stage: int, world: int, replicate: int
) -> None:
    for found in ranks(world, _fits, stage, world, replicate, **TRAINER):
        for name, expected in alone.items():
            for key, value in expected.items():
                torch.testing.assert_close(
                    found[name][key], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name, k=key: f"{n}, {k}: {m}"
                )
    assert not torch.equal(alone["norm"]["head.weight"], alone["value"]["head.weight"])


class Reductions:
    """Counts all-reduces between the end of the last backward and the optimizer's step."""

    def __init__(self, trainer: L.Trainer) -> None:
        self.counts: list[int] = []
        precision: Any = trainer.precision_plugin
        after_closure = precision._after_closure

        def counting(*args: Any, **kwargs: Any) -> None:
            original, calls = dist.all_reduce, 0

            def all_reduce(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                return original(*args, **kwargs)

            dist.all_reduce = all_reduce
            try:
                after_closure(*args, **kwargs)
            finally:
                dist.all_reduce = original
            self.counts.append(calls)

        precision._after_closure = counting


class Watching(Steep):
    """A user's hook that reads gradients before clipping (and could as well change them)."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        local_gradients(self.parameters())


def _reductions(rank: int, stage: int) -> dict[str, list[int]]:
    cases: dict[str, tuple[Steep, dict[str, Any]]] = {
        "none": (Steep(), {}),
        "norm": (Steep(), NORM),
        "value": (Steep(), VALUE),
        "norm, watched": (Steep(), {**NORM, "callbacks": [GradientClipping(groups=["layers.*", "head.*"])]}),
        "norm by the callback": (Steep(), {"callbacks": [GradientClipping(0.1)]}),
        "norm, hook in between": (Watching(), {**NORM, "callbacks": [GradientClipping()]}),
    }
    found = {}
    for name, (module, flags) in cases.items():
        trainer = zero(stage, 4, 2, **flags)
        reductions = Reductions(trainer)
        trainer.fit(module, Data())
        found[name] = reductions.counts
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_norm_takes_one_collective_per_step_whoever_asks(ranks: RankPool, stage: int) -> None:
    for found in ranks(4, _reductions, stage, **TRAINER):
        assert found == {
            "none": [0] * 4,
            "norm": [1] * 4,
            "value": [0] * 4,
            "norm, watched": [1] * 4,
            "norm by the callback": [1] * 4,
            "norm, hook in between": [2] * 4,
        }


class Exploding(TinyLM):
    """An infinite loss in its second step."""

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) * (float("inf") if self.global_step == 1 else 1.0)


def _exploding(rank: int) -> tuple[list[str], bool]:
    module = Exploding()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zero(1, 2, **NORM).fit(module, Data())
    told = [str(warning.message) for warning in caught if "not finite" in str(warning.message)]
    return told, all(bool(tensor.isfinite().all()) for tensor in whole(module).values())


def test_a_norm_that_is_not_finite_is_told_once(ranks: RankPool) -> None:
    (told, finite), (other, _) = ranks(2, _exploding, **TRAINER)
    assert len(told) == 1
    assert "skip_nonfinite=True" in told[0]
    assert other == []
    assert not finite

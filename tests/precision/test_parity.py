"""Every precision trains to the numbers of one process, which are written out by hand in `reference`."""

from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_5d import FiveD, FiveDPrecision, ZeRO
from lightning_5d.checkpoint.full_state import gather
from lightning_5d.loss_scaling import LossScaling
from tests.modules import TinyLM, batches
from tests.precision.reference import EPS, Run, train
from tests.ranks.pool import RankPool
from tests.trainers import quiet, whole

SEPARATE = {"backend": None, "timeout": 58.0}
STEPS = 4
# Mixed runs do the same operations in the same order, but for sums over ranks, which are fp32. The true ones add up in 16 bits.
TOLERANCES = {
    "32-true": 1e-5,
    "64-true": 1e-12,
    "bf16-mixed": 1e-4,
    "16-mixed": 1e-4,
    "bf16-true": 3e-2,
    "16-true": 5e-3,
}
SCALING = LossScaling(init_scale=2.0**18, growth_interval=2)


@dataclass(frozen=True)
class Setting:
    precision: str
    stage: int
    accumulate: int = 1
    clip: float | None = None
    replicate: int = 1
    autocast: bool = False
    state_dtype: torch.dtype | None = None


class _Tiny(TinyLM):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=EPS)


class _Watch(Callback):
    def __init__(self) -> None:
        self.run = Run()
        self._losses: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.run.gradients.append(gather({n: p.grad for n, p in pl_module.named_parameters()}, keep=True))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        accumulate = trainer.accumulate_grad_batches
        self._losses.append(float(outputs["loss"]) * accumulate)
        if (batch_idx + 1) % accumulate == 0:
            mean = torch.tensor(sum(self._losses) / len(self._losses), dtype=torch.float64)
            self.run.losses.append(float(trainer.strategy.reduce(mean)))
            self._losses.clear()
            scaler = trainer.precision_plugin.scaler
            self.run.scales.append(1.0 if scaler is None else scaler.scale)


def _fit(rank: int, ranks: int, settings: list[Setting]) -> list[Run]:
    runs = []
    for setting in settings:
        watch, module = _Watch(), _Tiny()
        scaling = SCALING if setting.precision.startswith("16") else None
        plugin = FiveDPrecision(
            setting.precision,
            loss_scaling=scaling,
            autocast=setting.autocast,
            optimizer_state_dtype=setting.state_dtype,
        )
        trainer = quiet(
            strategy=FiveD(ZeRO(stage=setting.stage, replicate=setting.replicate)),
            devices=ranks,
            plugins=plugin,
            accumulate_grad_batches=setting.accumulate,
            gradient_clip_val=setting.clip,
            use_distributed_sampler=False,
            callbacks=[watch],
        )
        mine = batches(STEPS * ranks * setting.accumulate)[rank::ranks]
        trainer.fit(module, DataLoader(mine, batch_size=None))  # type: ignore[arg-type]
        watch.run.weights = whole(module)
        runs.append(watch.run)
    return runs


def _expected(setting: Setting, ranks: int) -> Run:
    data = batches(STEPS * ranks * setting.accumulate)
    scaled = setting.precision.startswith("16")
    return train(
        setting.precision,
        data,
        ranks,
        setting.accumulate,
        setting.clip,
        SCALING.init_scale if scaled else 1.0,
        SCALING.growth_interval if scaled else 2000,
        setting.state_dtype,
    )


def _compare(found: Run, expected: Run, setting: Setting, ranks: int) -> None:
    where = f"{setting} on {ranks} ranks"
    tolerance = 3e-2 if setting.autocast else TOLERANCES[setting.precision]
    assert found.losses == [pytest.approx(loss, rel=tolerance) for loss in expected.losses], where
    assert found.scales == expected.scales, where
    for step, (one, other) in enumerate(zip(expected.gradients, found.gradients, strict=True)):
        finite = all(bool(grad.isfinite().all()) for grad in one.values())
        assert finite == all(bool(grad.isfinite().all()) for grad in other.values()), f"{where}, step {step}"
        if finite:
            _close(other, one, tolerance, f"{where}, gradients of step {step}")
    # Adam makes whole steps of gradients that are only rounding.
    _close(found.weights, expected.weights, 10 * tolerance, f"{where}, weights")


def _close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, where: str) -> None:
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        assert found[name].dtype == right.dtype, f"{where}: {name}"
        worst = float((found[name].double() - right.double()).abs().max() / right.double().abs().max().clamp(min=1e-6))
        assert worst <= tolerance, f"{where}: {name} differs by {worst:.1e}"


def _check(ranks: RankPool, world: int, settings: list[Setting]) -> None:
    results = ranks(world, _fit, world, settings, **SEPARATE)
    torch.set_num_threads(1)  # as the ranks: sums in 16 bits depend on how they are cut
    for index, setting in enumerate(settings):
        expected = _expected(setting, world)
        for runs in results:
            _compare(runs[index], expected, setting, world)


WINDOWS = [(1, None), (3, 0.5)]


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("world", [1, 2])
def test_mixed_precision_equals_one_process_at_every_stage(ranks: RankPool, world: int, precision: str) -> None:
    _check(ranks, world, [Setting(precision, stage, *window) for stage in (0, 1, 2, 3) for window in WINDOWS])


@pytest.mark.parametrize(("precision", "first"), [("bf16-mixed", 0), ("16-mixed", 1)])
def test_mixed_precision_equals_one_process_on_four_ranks(ranks: RankPool, precision: str, first: int) -> None:
    # Each stage with each window, but in one of the precisions: two ranks have all of them in both.
    settings = [Setting(precision, stage, *WINDOWS[(stage + first) % 2]) for stage in (0, 1, 2, 3)]
    _check(ranks, 4, [*settings, Setting(precision, 1, 3, 0.5, replicate=2)])


@pytest.mark.parametrize("world", [1, 2])
def test_true_precisions_equal_one_process(ranks: RankPool, world: int) -> None:
    settings = [Setting(precision, 1, *WINDOWS[1]) for precision in ("64-true", "bf16-true", "16-true")]
    settings += [Setting("16-true", stage, *WINDOWS[0]) for stage in (0, 3)]
    _check(ranks, world, settings)


@pytest.mark.parametrize("world", [1, 2])
def test_autocast_over_fp32_weights_trains_alike(ranks: RankPool, world: int) -> None:
    settings = [Setting(p, stage, 2, 0.5, autocast=True) for p in ("bf16-mixed", "16-mixed") for stage in (0, 1, 3)]
    _check(ranks, world, settings)


@pytest.mark.parametrize("world", [1, 2])
def test_optimizer_states_that_rest_in_bf16_are_rounded_once_a_step(ranks: RankPool, world: int) -> None:
    settings = [Setting(p, stage, state_dtype=torch.bfloat16) for p in ("32-true", "16-mixed") for stage in (0, 1, 3)]
    _check(ranks, world, settings)

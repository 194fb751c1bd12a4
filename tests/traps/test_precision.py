"""Sections B and C: loss scaling skips on all ranks or on none, and a skipped step leaves no trace."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_5d import FiveD, FiveDPrecision, ZeRO
from lightning_5d.loss_scaling import LossScaling
from tests.modules import Line
from tests.ranks.pool import RankPool
from tests.trainers import quiet, whole
from tests.traps.replicas import STAGES, TRAINER, Replicas, one_and_same
from tests.traps.test_accumulation import Numbered


def scaled(
    stage: int, ranks: int, scaling: LossScaling, precision: str = "16-mixed", replicas: bool = False, **arguments: Any
) -> L.Trainer:
    plugins = (ZeRO(stage=stage), Replicas()) if replicas else (ZeRO(stage=stage),)
    precise = FiveDPrecision(precision, loss_scaling=scaling)
    return quiet(strategy=FiveD(*plugins), devices=ranks, plugins=precise, **arguments)


def repeated(count: int, ranks: int) -> DataLoader[Tensor]:
    return DataLoader(torch.ones(count * ranks, 1), batch_size=1)  # type: ignore[arg-type]


class TwoKinds(L.LightningModule):
    """A vector that is sharded, and a scalar that is not; one element of one rank's gradient is not finite."""

    def __init__(self, broken: str, bad_rank: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(4))
        self.scalar = nn.Parameter(torch.zeros(()))
        self.broken, self.bad_rank = broken, bad_rank
        self.overflows: list[bool] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        bad = float("inf") if self.global_rank == self.bad_rank and batch_idx == 1 else 1.0
        first, last = (bad if self.broken == "vector" else 1.0), (bad if self.broken == "scalar" else 1.0)
        return self.vector[:3].sum() + first * self.vector[3] + last * self.scalar.float()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.overflows.append(self.trainer.strategy.overflow)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.0)


def _one_overflow(rank: int, cases: list[tuple[int, str, int, bool]], ranks: int) -> list[dict[str, Any]]:
    found = []
    for stage, broken, bad_rank, replicas in cases:
        module = TwoKinds(broken, bad_rank)
        trainer = scaled(stage, ranks, LossScaling(4.0), replicas=replicas)
        trainer.fit(module, repeated(2, ranks // 2 if replicas else ranks))
        steps = [float(state["step"]) for state in trainer.optimizers[0].state.values()]
        found.append(
            {
                "weights": {name: tensor.tolist() for name, tensor in whole(module).items()},
                "scale": trainer.precision_plugin.scaler.scale,
                "skipped": trainer.strategy.skipped_steps.state_dict(),
                "overflows": module.overflows,
                "steps": steps,
            }
        )
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_07_an_overflow_on_one_rank_skips_the_step_on_all(ranks: RankPool, world: int) -> None:
    cases = [(stage, broken, 1, False) for stage in STAGES for broken in ("vector", "scalar")]
    cases += [(stage, "vector", 0, False) for stage in (0, 3)]
    if world == 4:  # the bad rank's replicas along another axis did not see it
        cases += [(1, "vector", 3, True), (0, "scalar", 0, True)]
    for found in one_and_same(ranks(world, _one_overflow, cases, world, **TRAINER)):
        assert found["scale"] == 2.0
        assert found["skipped"]["by_reason"] == {"loss scale": 1}
        assert found["skipped"]["last"] == {"step": 1, "reason": "loss scale", "scale": 4.0, "optimizer_index": 0}
        assert found["overflows"] == [False, True]
        assert found["weights"]["vector"] == [pytest.approx(-0.1)] * 4
        assert found["weights"]["scalar"] == pytest.approx(-0.1)
        assert found["steps"] == [1.0, 1.0]


class Clipped(Line):
    """Its gradient is 2, and the norm it sees is logged before and after clipping."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.norms: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return 2.0 * super().training_step(batch, batch_idx)

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.norms.append(float(self.trainer.strategy.gradient_norm()))
        self.clip_gradients(optimizer, gradient_clip_val or 1.0, gradient_clip_algorithm or "norm")
        self.norms.append(float(self.trainer.strategy.gradient_norm()))


def _clipped(rank: int, ranks: int) -> list[list[float]]:
    found = []
    for stage in STAGES:
        for by_hand in (False, True):
            module = Clipped(by_hand)
            trainer = scaled(stage, ranks, LossScaling(1024.0), gradient_clip_val=None if by_hand else 1.0)
            trainer.fit(module, repeated(2, ranks))
            found.append([*module.norms, float(whole(module)["w"])])
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_08_clipping_sees_true_gradients(ranks: RankPool, world: int) -> None:
    for found in one_and_same(ranks(world, _clipped, world, **TRAINER)):
        assert found == [pytest.approx(x, rel=1e-5) for x in (2.0, 1.0, 2.0, 1.0, -0.2)]


def _saved(rank: int, stage: int, ranks: int, folder: str) -> dict[str, Any]:
    settings = LossScaling(1024.0, growth_interval=4)
    module, trainer = Line(), scaled(stage, ranks, settings)
    trainer.fit(module, repeated(3, ranks))
    path = f"{folder}/run.ckpt"
    before = whole(module)
    trainer.save_checkpoint(path)

    def facts(trainer: L.Trainer, module: nn.Module) -> tuple[Any, ...]:
        scaler = trainer.precision_plugin.scaler
        return scaler.scale, scaler.growth_tracker, trainer.strategy.skipped_steps.attempts, whole(module)["w"].item()

    same_process = facts(trainer, module)
    other, fresh = Line(), scaled(stage, ranks, settings, max_epochs=2)
    seen: list[tuple[Any, ...]] = []

    class Look(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            seen.append(facts(trainer, pl_module))

    fresh.callbacks.append(Look())
    fresh.fit(other, repeated(3, ranks), ckpt_path=path)
    state = torch.load(path, weights_only=True)
    return {
        "same": same_process,
        "fresh": seen[0],
        "after": facts(fresh, other)[:3],
        "file": state["FiveDPrecision"],
        "weight": before["w"].item(),
    }


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_10_saving_and_loading_leave_scale_and_counters_as_they_are(
    ranks: RankPool, stage: int, tmp_path: Path
) -> None:
    found = one_and_same(ranks(2, _saved, stage, 2, str(tmp_path), **TRAINER))
    assert found["same"] == (1024.0, 3, 3, found["weight"])
    assert found["fresh"] == found["same"]
    assert found["after"] == (2048.0, 2, 6)
    assert found["file"]["loss_scaler"] == {"scale": 1024.0, "growth_tracker": 3, "hysteresis_left": 1}
    assert found["file"]["skipped_steps"]["attempts"] == 3


class Overflowing(Line):
    """Gradient 1; the first two steps overflow. Its schedule hook may be the user's own."""

    def __init__(self, plateau: bool = False, own_hook: bool = False) -> None:
        super().__init__(lr=1.0, gamma=0.5)
        self.plateau, self.calls = plateau, 0
        if own_hook:
            self.__class__ = OwnHook

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("constant", 1.0)
        return loss * (float("inf") if batch_idx // self.trainer.accumulate_grad_batches < 2 else 1.0)

    def configure_optimizers(self) -> Any:
        if not self.plateau:
            return super().configure_optimizers()
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        settings = {"scheduler": schedule, "interval": "step", "monitor": "constant"}
        return {"optimizer": optimizer, "lr_scheduler": settings}


class OwnHook(Overflowing):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.calls += 1
        super().lr_scheduler_step(scheduler, metric)


def _overflowing(rank: int, ranks: int, cases: list[tuple[int, int, bool, bool, bool]]) -> list[tuple[float, ...]]:
    found = []
    for stage, accumulate, replicas, plateau, own_hook in cases:
        module = Overflowing(plateau, own_hook)
        trainer = scaled(stage, ranks, LossScaling(4.0), replicas=replicas, accumulate_grad_batches=accumulate)
        trainer.fit(module, repeated(4 * accumulate, ranks // 2 if replicas else ranks))
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        weight = float(whole(module)["w"])
        steps = trainer.strategy.skipped_steps
        found.append((weight, steps.total, rate, trainer.global_step, steps.attempts, module.calls))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_13_a_skipped_step_does_not_advance_the_schedule(ranks: RankPool, world: int) -> None:
    cases = [(stage, accumulate, False, False, False) for stage in STAGES for accumulate in (1, 2)]
    cases += [(1, 1, True, False, False)] if world == 2 else []
    for found in one_and_same(ranks(world, _overflowing, world, cases, **TRAINER)):
        assert found == (-1.5, 2, 0.25, 4, 4, 0)


def test_13_nor_a_plateau_schedule_or_one_with_a_hook_of_the_users(ranks: RankPool) -> None:
    plateau, hooked = one_and_same(
        ranks(2, _overflowing, 2, [(1, 1, False, True, False), (3, 2, False, False, True)], **TRAINER)
    )
    # The first good step sets the plateau's best value, the second is no better.
    assert plateau == (-2.0, 2, 0.5, 4, 4, 0)
    assert hooked == (-1.5, 2, 0.25, 4, 4, 2)


def _windows(rank: int, ranks: int) -> list[list[float]]:
    found = []
    for stage in STAGES:
        for count, accumulate, epochs in ((2, 4, 2), (6, 4, 1)):
            module = Line()
            trainer = scaled(stage, ranks, LossScaling(1024.0), accumulate_grad_batches=accumulate, max_epochs=epochs)
            trainer.fit(module, Numbered(count))
            found.append(module.seen)
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_14_19_windows_are_means_in_fp16_too(ranks: RankPool, world: int) -> None:
    for index, found in enumerate(one_and_same(ranks(world, _windows, world, **TRAINER))):
        assert found == ([2.5, 5.5] if index % 2 else [1.5, 1.5])

"""`LossScaleMonitor`: what the loss scale does is logged and written, and training that no longer learns ends on all ranks."""

import json
import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_5d.callbacks import GradientClipping, LossScaleMonitor
from lightning_5d.loss_scaling import LossScaling
from tests.callbacks.test_gradient_clipping import Metrics
from tests.ranks import RankPool
from tests.trainers import quiet, whole, zero
from tests.traps.replicas import STAGES, TRAINER
from tests.traps.test_precision import repeated, scaled

NAMES = ("loss_scale", "loss_scale_skips", "loss_scale_skips_in_a_row", "loss_scale_skip_rate")


class Overflowing(L.LightningModule):
    """Gradients of one, but in the steps of `bad`, on one rank, the second layer's last element is infinite."""

    def __init__(self, bad: tuple[int, ...], rank: int = 1) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        for layer in (self.first, self.second):
            nn.init.zeros_(layer.weight)
        self.bad, self.bad_rank = bad, rank

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        broken = self.trainer.global_step in self.bad and self.global_rank == self.bad_rank
        last = float("inf") if broken else 1.0
        return self.first.weight.sum() + self.second.weight[0].sum() + last * self.second.weight[1, 1]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Told(logging.Handler):
    """What Lightning says on the log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _watched(rank: int, stage: int, world: int, folder: str) -> dict[str, Any]:
    metrics, told = Metrics(), Told()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(told)
    path = Path(folder) / "runs" / f"skips-{stage}.jsonl"
    try:
        trainer = scaled(
            stage, world, LossScaling(8.0, growth_interval=2), callbacks=[LossScaleMonitor(path=path), metrics]
        )
        trainer.fit(Overflowing((1, 2, 5)), repeated(7, world))
    finally:
        logger.removeHandler(told)
    return {
        "columns": {name: metrics.column(name) for name in NAMES},
        "lines": [json.loads(line) for line in path.read_text().splitlines()],
        "told": [line for line in told.lines if line.startswith("Loss scale")],
    }


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 2), (2, 4), (3, 2)])
def test_scale_and_skips_are_logged_written_and_summed_up(
    ranks: RankPool, tmp_path: Path, stage: int, world: int
) -> None:
    results = ranks(world, _watched, stage, world, str(tmp_path), **TRAINER)
    for found in results:
        assert found["columns"] == {
            "loss_scale": [8, 4, 2, 2, 4, 2, 2],
            "loss_scale_skips": [0, 1, 2, 2, 2, 3, 3],
            "loss_scale_skips_in_a_row": [0, 1, 2, 0, 0, 1, 0],
            "loss_scale_skip_rate": pytest.approx([0, 1 / 2, 2 / 3, 2 / 4, 2 / 5, 3 / 6, 3 / 7]),
        }
        first, second, third = found["lines"]  # one file, not one per rank
        (parameter,) = first.pop("parameters")
        assert first == {"step": 1, "scale": 8.0, "optimizer": 0, "skips": 1, "in_a_row": 1}
        assert parameter["name"] == "second.weight"
        # Plain gradients (stage 0) are infinite wherever they are held; of shards, the one with the last row.
        assert parameter["ranks"] == (list(range(world)) if stage == 0 else [1])
        assert (second["step"], second["scale"], second["in_a_row"]) == (2, 4.0, 2)
        assert (third["step"], third["scale"], third["skips"], third["in_a_row"]) == (5, 4.0, 3, 1)
    (told,) = results[0]["told"]
    assert "2 at the end" in told
    assert "3 of 7 optimizer steps (43 %)" in told
    assert "at most 2 in a row" in told
    assert "skips-" in told


class Noted(LossScaleMonitor):
    """Remembers the error it raised: on ranks that hear of another's first, that one reaches the caller."""

    def on_before_optimizer_step(self, trainer: L.Trainer, *arguments: Any) -> None:
        try:
            super().on_before_optimizer_step(trainer, *arguments)
        except MisconfigurationException as error:
            self.error, self.at = str(error), trainer.global_step
            raise


def _hopeless(rank: int, stage: int, limit: int) -> dict[str, Any]:
    class Infinite(Overflowing):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (self.second.weight.sum() + self.first.weight.sum()) * float("inf")

    metrics, monitor = Metrics(), Noted(limit)
    trainer = scaled(stage, 2, LossScaling(16.0, min_scale=1.0), callbacks=[monitor, metrics])
    module = Infinite(())
    with pytest.raises(Exception, match="in a row"):
        trainer.fit(module, repeated(50, 2))
    return {
        "error": monitor.error,
        "at": monitor.at,
        "skips": metrics.column("loss_scale_skips"),
        "scales": metrics.column("loss_scale"),
    }


@pytest.mark.parametrize("stage", STAGES)
def test_11_gradients_that_stay_infinite_end_training_at_the_floor_on_all_ranks(ranks: RankPool, stage: int) -> None:
    first, second = ranks(2, _hopeless, stage, 20, **TRAINER)
    assert first == second
    assert first["at"] == 4  # scales 16, 8, 4, 2 and 1 have been tried
    assert first["skips"] == [1, 2, 3, 4]
    assert first["scales"] == [8, 4, 2, 1]
    assert (
        "not finite in 5 optimizer steps in a row (at the smallest loss scale, 1; 5 skipped in all)" in first["error"]
    )
    assert "The first parameter whose gradient is not finite is first.weight (ranks 0, 1), one of 2." in first["error"]


def test_11_the_limit_of_skips_in_a_row_ends_training_before_the_floor(ranks: RankPool) -> None:
    first, second = ranks(2, _hopeless, 1, 3, **TRAINER)
    assert first == second
    assert first["at"] == 2
    assert (
        "in 3 optimizer steps in a row (the limit is max_skips_in_a_row=3, and the loss scale is down to 4"
        in first["error"]
    )


def _resumed(rank: int, folder: str) -> tuple[dict[str, Any], dict[str, Any], list[Any], list[Any]]:
    def run(steps: int, **arguments: Any) -> tuple[L.Trainer, LossScaleMonitor, Metrics]:
        monitor, metrics = LossScaleMonitor(), Metrics()
        trainer = scaled(1, 2, LossScaling(64.0), callbacks=[monitor, metrics], max_steps=steps, max_epochs=2)
        trainer.fit(Overflowing((1, 2, 3)), repeated(5, 2), **arguments)
        return trainer, monitor, metrics

    _, straight, all_metrics = run(5)
    trainer, _, _ = run(3)
    trainer.save_checkpoint(f"{folder}/half.ckpt")
    _, resumed, metrics = run(5, ckpt_path=f"{folder}/half.ckpt")
    rows = [all_metrics.column(name)[3:] for name in NAMES]
    return straight.state_dict(), resumed.state_dict(), rows, [metrics.column(name) for name in NAMES]


def test_counts_go_on_after_a_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    for straight, resumed, expected, found in ranks(2, _resumed, str(tmp_path), **TRAINER):
        assert resumed == straight == {"in_a_row": {"0": 0}, "longest": 3}
        assert found == expected


def _silent(rank: int, folder: str) -> list[set[str]]:
    found = []
    for trainer in (zero(1, 2), quiet()):
        metrics = Metrics()
        trainer.callbacks += [LossScaleMonitor(path=f"{folder}/skips.jsonl"), metrics]  # type: ignore[attr-defined]
        trainer.fit(Overflowing(()), repeated(2, 2))
        found.append(set().union(*metrics.rows))
    return found


def test_without_a_loss_scale_nothing_is_logged_or_written(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2, _silent, str(tmp_path), **TRAINER) == [[set(), set()]] * 2
    assert list(tmp_path.iterdir()) == []


def _both(rank: int, stage: int) -> dict[str, Any]:
    """An overflow, a spike and a NaN of the loss scale's, all seen by the callback that should see them."""
    metrics = Metrics()
    clipping = GradientClipping(skip_nonfinite=True, skip_spikes=5.0, min_history=2, window=10)

    class Spiky(Overflowing):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (40.0 if batch_idx == 4 else 1.0)

    trainer = scaled(
        stage, 2, LossScaling(8.0), callbacks=[LossScaleMonitor(), clipping, metrics], gradient_clip_val=1.0
    )
    module = Spiky((1,))
    trainer.fit(module, repeated(6, 2))
    history = clipping.histories[0]
    return {
        "reasons": trainer.strategy.skipped_steps.by_reason,  # type: ignore[attr-defined]
        "norms": [round(norm, 4) for norm in history.norms],
        "counts": (history.steps, history.skipped_spikes, history.skipped_nonfinite, int(history.clipped)),
        "clipped": metrics.column("gradient_norm_clipped")[-1],
        "weight": float(whole(module)["first.weight"][0, 0]),
    }


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_overflows_and_spikes_are_counted_apart(ranks: RankPool, stage: int) -> None:
    norm = 7**0.5  # of seven elements of one: all but second.weight[1, 0]
    for found in ranks(2, _both, stage, **TRAINER):
        assert found["reasons"] == {"loss scale": 1, "gradient spike": 1}
        assert found["norms"] == [pytest.approx(norm, abs=1e-3)] * 4
        assert found["counts"] == (4, 1, 0, 4)
        assert found["clipped"] == pytest.approx(1.0, rel=1e-5)
        assert found["weight"] == pytest.approx(-0.5 * 4 / norm, rel=1e-4)


class ByHand(L.LightningModule):
    """Manual fp16 steps that clip before the optimizer's step; gradients (3, 4), the last one infinite in step 1."""

    def __init__(self, algorithm: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = nn.Parameter(torch.zeros(2))
        self.algorithm = algorithm
        self.norms: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        bad = float("inf") if batch_idx == 1 and self.global_rank == 0 else 4.0
        self.manual_backward(3.0 * self.weight[0] + bad * self.weight[1])
        bound = 1.0 if self.algorithm == "norm" else 3.5
        self.clip_gradients(optimizer, gradient_clip_val=bound, gradient_clip_algorithm=self.algorithm)
        self.norms.append(float(self.trainer.strategy.gradient_norm()))  # type: ignore[attr-defined]
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def _by_hand(rank: int, stage: int, world: int) -> list[Any]:
    found: list[Any] = []
    for algorithm in ("norm", "value"):
        module = ByHand(algorithm)
        trainer = scaled(stage, world, LossScaling(1024.0))
        trainer.fit(module, repeated(3, world))
        strategy: Any = trainer.strategy
        found.append((module.norms[0], module.norms[2], whole(module)["weight"].tolist(), strategy.skipped_steps.total))
    return found


@pytest.mark.parametrize(("stage", "world"), [(1, 1), (0, 2), (1, 2), (2, 2), (3, 2)])
def test_08_a_manual_step_clips_true_gradients_and_hides_no_overflow(ranks: RankPool, stage: int, world: int) -> None:
    for by_norm, by_value in ranks(world, _by_hand, stage, world, **TRAINER):
        assert by_norm[:2] == pytest.approx([1.0, 1.0], rel=1e-5)
        assert by_norm[2:] == ([pytest.approx(-1.2), pytest.approx(-1.6)], 1)
        assert by_value[2:] == ([pytest.approx(-6.0), pytest.approx(-7.0)], 1)


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_skips_in_a_row=0 is less than 1"):
        LossScaleMonitor(0)

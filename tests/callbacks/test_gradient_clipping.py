"""`GradientClipping`: norms that are logged, thresholds that move, steps that are left out."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_5d.callbacks import GradientClipping
from lightning_5d.callbacks.norm_history import NormHistory
from lightning_5d.strategy import FiveD
from tests.ranks import RankPool
from tests.trainers import quiet, zero
from tests.traps.replicas import STAGES, TRAINER
from tests.traps.test_accumulation import in_order


class Pair(L.LightningModule):
    """Two weights of two elements; the gradient of each step is its batch, (a, b, c, d), so norms are known."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
        for layer in (self.first, self.second):
            nn.init.zeros_(layer.weight)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        mean = batch.mean(0)
        return (self.first.weight[0] * mean[:2]).sum() + (self.second.weight[0] * mean[2:]).sum()

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(
            [
                {"params": self.first.parameters(), "name": "first"},
                {"params": self.second.parameters(), "weight_decay": 0.0},
            ],
            lr=1.0,
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def weights(self) -> list[float]:
        from lightning_5d.checkpoint.full_state import gather

        whole = gather({"first": self.first.weight, "second": self.second.weight}, keep=True)
        return [*whole["first"].flatten().tolist(), *whole["second"].flatten().tolist()]


class Steps(L.LightningDataModule):
    """One batch per step, the same on all data ranks."""

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        super().__init__()
        self.rows = [torch.tensor(row, dtype=torch.float32) for row in rows]

    def train_dataloader(self) -> DataLoader[Tensor]:
        assert self.trainer is not None
        if not isinstance(self.trainer.strategy, FiveD):
            return DataLoader(self.rows, batch_size=1)  # type: ignore[arg-type]
        return in_order(self.trainer, self.rows, repeat=True)


class Metrics(L.Callback):
    """What was logged, step by step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.rows.append({name: float(value) for name, value in trainer.logged_metrics.items()})

    def column(self, name: str) -> list[float | None]:
        return [row.get(name) for row in self.rows]


def along(norms: Sequence[float]) -> list[list[float]]:
    """Gradients of these norms, all in one direction."""
    return [[0.6 * norm, 0.0, 0.0, 0.8 * norm] for norm in norms]


def fit(callback: GradientClipping, rows: Sequence[Sequence[float]], module: Pair | None = None, **flags: Any) -> Any:
    metrics = Metrics()
    module = module or Pair()
    trainer = quiet(callbacks=[callback, metrics], **flags)
    trainer.fit(module, Steps(rows))
    return trainer, module, metrics


def _logged(rank: int, stage: int | None, ranks: int, algorithm: str) -> dict[str, list[float | None]]:
    flags: dict[str, Any] = {"gradient_clip_val": 2.0 if algorithm == "norm" else 1.6}
    metrics, module = Metrics(), Pair()
    callbacks = [GradientClipping(groups={"head": "second.*", "all": "*"}), metrics]
    flags |= {"gradient_clip_algorithm": algorithm, "callbacks": callbacks}
    trainer = quiet(**flags) if stage is None else zero(stage, ranks, **flags)
    trainer.fit(module, Steps(along([1, 4, 2, 8])))
    names = (
        "gradient_norm",
        "gradient_norm_clipped",
        "gradient_clipped_share",
        "gradient_norm/head",
        "gradient_norm/all",
    )
    return {"weights": module.weights(), **{name: metrics.column(name) for name in names}}  # type: ignore[dict-item]


@pytest.mark.parametrize(("stage", "world"), [(None, 1), (0, 2), (1, 2), (3, 2), (2, 4)])
def test_norms_before_and_after_the_trainers_clipping_are_logged(
    ranks: RankPool, stage: int | None, world: int
) -> None:
    env = {"env": {"WORLD_SIZE": None}} if stage is None else {}
    for found in ranks(world, _logged, stage, world, "norm", **TRAINER, **env):
        assert found["gradient_norm"] == pytest.approx([1, 4, 2, 8])
        assert found["gradient_norm_clipped"] == pytest.approx([1, 2, 2, 2], rel=1e-5)
        assert found["gradient_clipped_share"] == pytest.approx([0, 1 / 2, 1 / 3, 2 / 4])
        assert found["gradient_norm/head"] == pytest.approx([0.8, 3.2, 1.6, 6.4])
        assert found["gradient_norm/all"] == pytest.approx([1, 4, 2, 8])
        assert found["weights"] == pytest.approx([-0.6 * 7, 0, 0, -0.8 * 7], rel=1e-5)


def test_what_clipping_by_value_leaves_is_measured(ranks: RankPool) -> None:
    for found in ranks(2, _logged, 1, 2, "value", **TRAINER):
        assert found["gradient_norm"] == pytest.approx([1, 4, 2, 8])
        assert found["gradient_norm_clipped"] == pytest.approx([1, math.hypot(1.6, 1.6), 2, math.hypot(1.6, 1.6)])
        assert found["gradient_clipped_share"] == pytest.approx([0, 1 / 2, 1 / 3, 2 / 4])


def test_parameter_groups_are_logged_under_their_names_or_numbers() -> None:
    _, _, metrics = fit(GradientClipping(groups="optimizer"), along([1, 5]))
    assert metrics.column("gradient_norm/first") == pytest.approx([0.6, 3.0])
    assert metrics.column("gradient_norm/1") == pytest.approx([0.8, 4.0])


def test_the_threshold_warms_up_over_the_steps_taken() -> None:
    callback = GradientClipping(4.0, warmup_steps=3, warmup_from=1.0)
    _, module, metrics = fit(callback, along([10] * 5))
    assert metrics.column("gradient_clip_threshold") == pytest.approx([1, 2, 3, 4, 4])
    assert metrics.column("gradient_norm_clipped") == pytest.approx([1, 2, 3, 4, 4], rel=1e-5)
    assert module.weights() == pytest.approx([-0.6 * 14, 0, 0, -0.8 * 14], rel=1e-5)


def test_the_quantile_is_that_of_the_norms_before_clipping_of_earlier_steps() -> None:
    callback = GradientClipping(quantile=0.5, window=3, min_history=2)
    _, _, metrics = fit(callback, along([1, 3, 10, 4, 4, 4]))
    # Steps before: none, [1], [1, 3], [1, 3, 10], [3, 10, 4], [10, 4, 4].
    assert metrics.column("gradient_clip_threshold")[:2] == [None, None]
    assert metrics.column("gradient_clip_threshold")[2:] == pytest.approx([2, 3, 4, 4])
    assert metrics.column("gradient_norm_clipped") == pytest.approx([1, 3, 2, 3, 4, 4], rel=1e-5)
    assert metrics.column("gradient_clipped_share")[-1] == pytest.approx(2 / 6)


def test_the_smaller_of_limit_and_quantile_holds() -> None:
    callback = GradientClipping(5.0, quantile=1.0, window=2, min_history=2)
    _, _, metrics = fit(callback, along([2, 3, 9, 9, 9]))
    assert metrics.column("gradient_clip_threshold") == pytest.approx([5, 5, 3, 5, 5])


def test_other_norms_are_clipped_by() -> None:
    callback = GradientClipping(4.0, norm_type=math.inf)
    _, _, metrics = fit(callback, along([1, 10]))
    assert metrics.column("gradient_norm") == pytest.approx([0.8, 8.0])
    assert metrics.column("gradient_norm_clipped") == pytest.approx([0.8, 4.0], rel=1e-5)


SPIKY = [1.0, 1.1, 0.9, 50.0, 1.0]


@pytest.mark.parametrize("stage", [None, *STAGES])
def test_a_spike_and_a_norm_that_is_not_finite_are_left_out(ranks: RankPool, stage: int | None) -> None:
    world, env = (1, {"env": {"WORLD_SIZE": None}}) if stage is None else (2, {})
    for found in ranks(world, _left_out, stage, world, **TRAINER, **env):
        assert found["weights"] == pytest.approx([-0.6 * 4, 0, 0, -0.8 * 4], rel=1e-5)
        assert found["spikes"] == [0, 0, 0, 1, 1, 1]
        assert found["nonfinite"] == [0, 0, 0, 0, 1, 1]
        assert found["norms"] == pytest.approx([1.0, 1.1, 0.9, 1.0])
        if stage is not None:
            assert found["by_reason"] == {"gradient spike": 1, "non-finite gradient": 1}
            assert found["schedule"] == 4


def _left_out(rank: int, stage: int | None, ranks: int) -> dict[str, Any]:
    metrics, module = Metrics(), Pair()
    callback = GradientClipping(skip_nonfinite=True, skip_spikes=5.0, min_history=3, window=10)
    flags: dict[str, Any] = {"callbacks": [callback, metrics]}
    trainer = quiet(**flags) if stage is None else zero(stage, ranks, **flags)
    rows = along(SPIKY)
    rows.insert(4, [1.0, math.nan, 0.0, 0.0])
    trainer.fit(module, Steps(rows))
    found = {
        "weights": module.weights(),
        "spikes": metrics.column("gradient_skips_spike"),
        "nonfinite": metrics.column("gradient_skips_nonfinite"),
        "norms": list(callback.histories[0].norms),
    }
    if isinstance(trainer.strategy, FiveD):
        found["by_reason"] = dict(trainer.strategy.skipped_steps.by_reason)  # type: ignore[attr-defined]
        found["schedule"] = trainer.lr_scheduler_configs[0].scheduler.last_epoch
    return found


def test_a_new_level_of_norms_is_accepted_after_so_many_spikes_in_a_row() -> None:
    callback = GradientClipping(skip_spikes=3.0, max_skips_in_a_row=2, min_history=2, window=10)
    with pytest.warns(UserWarning, match="new level: around 10.* instead of 1"):
        _, module, metrics = fit(callback, along([1.0, 1.0, 1.0, 10.0, 10.1, 10.2, 10.1]))
    assert metrics.column("gradient_skips_spike") == [0, 0, 0, 1, 2, 2, 2]
    assert list(callback.histories[0].norms) == pytest.approx([10.0, 10.1, 10.2, 10.1])
    assert module.weights()[0] == pytest.approx(-0.6 * (3 + 20.3), rel=1e-5)


def test_norms_that_stay_not_finite_end_training_with_the_parameters_name(ranks: RankPool) -> None:
    messages = ranks(2, _nan_for_good, **TRAINER)
    assert messages[0] == messages[1]
    assert "3 steps in a row" in messages[0]
    assert "first parameter concerned is second.weight" in messages[0]


class Noted(GradientClipping):
    """Remembers the error it raised: on ranks that hear of another's first, that one reaches the caller."""

    def on_before_optimizer_step(self, *arguments: Any) -> None:
        try:
            super().on_before_optimizer_step(*arguments)
        except MisconfigurationException as error:
            self.error = str(error)
            raise


def _nan_for_good(rank: int) -> str:
    callback = Noted(skip_nonfinite=True, max_skips_in_a_row=3)
    with pytest.raises(Exception, match="in a row"):
        zero(1, 2, callbacks=[callback]).fit(Pair(), Steps([*along([1]), *[[0.0, 0.0, math.nan, 1.0]] * 5]))
    return callback.error


class ByHand(Pair):
    """Two optimizers by hand, one step each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in (self.first, self.second)]


def test_each_of_several_optimizers_has_its_own_norm_and_history() -> None:
    callback = GradientClipping(2.0)
    _, module, metrics = fit(callback, along([1, 5]), ByHand())
    assert metrics.column("gradient_norm/optimizer0") == pytest.approx([0.6, 3.0])
    assert metrics.column("gradient_norm/optimizer1") == pytest.approx([0.8, 4.0])
    assert metrics.column("gradient_clipped_share/optimizer1") == [0.0, 0.5]
    assert module.weights() == pytest.approx([-2.6, 0, 0, -2.8], rel=1e-5)


def test_counts_and_window_survive_a_checkpoint_exactly(tmp_path: Path) -> None:
    def make() -> GradientClipping:
        return GradientClipping(quantile=0.7, skip_spikes=8.0, window=4, min_history=2)

    rows = along([1.0, 1.3, 0.7, 90.0, 1.1, 2.0, 1.9, 0.3])
    straight = make()
    _, expected, _ = fit(straight, rows)
    trainer, _, _ = fit(make(), rows[:4])
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    second, resumed = make(), Pair()
    metrics = Metrics()
    trainer = quiet(callbacks=[second, metrics], max_epochs=2)
    trainer.fit(resumed, Steps(rows[4:]), ckpt_path=tmp_path / "half.ckpt")
    assert second.state_dict() == straight.state_dict()
    assert second.histories[0].skipped_spikes == 1
    assert resumed.weights() == expected.weights()


def test_two_ways_to_clip_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"gradient_clip_val=0.5.*max_norm=1.0.*both clip"):
        fit(GradientClipping(1.0), along([1]), gradient_clip_val=0.5)


def test_a_strategy_whose_gradients_cannot_be_read_is_refused() -> None:
    trainer = quiet()
    trainer.strategy.__class__ = FSDPStrategy
    with pytest.raises(MisconfigurationException, match="cannot read gradients under FSDPStrategy"):
        GradientClipping().setup(trainer, Pair(), "fit")


def test_settings_that_do_not_go_together_are_listed() -> None:
    with pytest.raises(ValueError) as error:
        GradientClipping(-1.0, warmup_steps=5, quantile=1.5, skip_spikes=0.0, window=5, groups="head")
    for part in ("max_norm=-1.0", "warmup_from=None", "quantile=1.5", "skip_spikes=0.0", "min_history=10", '["head"]'):
        assert part in str(error.value)
    with pytest.raises(ValueError, match=r"max_norm='abc' is not a number; window=2.5 is not a whole number"):
        GradientClipping("abc", window=2.5)  # type: ignore[arg-type]


def test_a_pattern_without_parameters_is_told() -> None:
    with pytest.warns(UserWarning, match="no parameter is named 'third"):
        _, _, metrics = fit(GradientClipping(groups=["third.*"]), along([1]))
    assert metrics.column("gradient_norm/third.*") == [0.0]


def test_deviations_of_nearly_equal_norms_are_measured_against_a_hundredth_of_the_mean() -> None:
    history = NormHistory(10)
    history.restart([2.0, 2.0, 2.0])
    assert history.deviations(2.02) == pytest.approx(1.0)
    history.restart([1.0, 3.0])
    assert history.deviations(5.0) == pytest.approx(3.0)
    assert history.deviations(1.0) == pytest.approx(-1.0)

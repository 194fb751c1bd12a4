"""Steps that are left out: by an overflow or by a callback, with several optimizers, by hand."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_5d import FiveD, FiveDPrecision, LossScaling, ZeRO
from tests.modules import Line
from tests.ranks.pool import RankPool
from tests.strategy.test_trainer import Adversarial, Data
from tests.trainers import quiet, whole
from tests.traps.replicas import STAGES, TRAINER, one_and_same
from tests.traps.test_precision import repeated, scaled


class SkipSecond(Callback):
    """Leaves the second step out, for a reason of its own."""

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        if trainer.global_step == 1:
            trainer.strategy.skip_step("spike")
            trainer.strategy.skip_step("late")


def _skipped(rank: int, ranks: int) -> list[dict[str, Any]]:
    found = []
    for stage in STAGES:
        for precision in ("32-true", "bf16-mixed"):
            module = Line(lr=1.0, gamma=0.5)
            trainer = quiet(
                strategy=FiveD(ZeRO(stage=stage)),
                devices=ranks,
                plugins=FiveDPrecision(precision),
                callbacks=[SkipSecond()],
                gradient_clip_val=10.0,
            )
            trainer.fit(module, repeated(3, ranks))
            found.append(
                {
                    "weight": float(whole(module)["w"]),
                    "rate": trainer.optimizers[0].param_groups[0]["lr"],
                    "skipped": trainer.strategy.skipped_steps.state_dict(),
                    "overflow": trainer.strategy.overflow,
                    "seen": module.seen,
                }
            )
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_callback_skips_a_step_in_any_precision(ranks: RankPool, world: int) -> None:
    for found in one_and_same(ranks(world, _skipped, world, **TRAINER)):
        assert found["weight"] == -1.5  # 1 and, after one advance of the schedule, 1/2
        assert found["rate"] == 0.25
        assert found["seen"] == [1.0, 1.0, 1.0]
        assert not found["overflow"]
        last = {"step": 1, "reason": "spike", "scale": None, "optimizer_index": 0}
        assert found["skipped"] == {"attempts": 3, "by_reason": {"spike": 1}, "last": last, "in_a_row": {0: 0}}


def test_skip_step_outside_of_a_step_or_without_a_reason_is_refused() -> None:
    strategy = FiveD()
    with pytest.raises(MisconfigurationException, match="on_before_optimizer_step"):
        strategy.skip_step("spike")
    with pytest.raises(ValueError, match="reason"):
        strategy.skip_step("")


class ByHand(Adversarial):
    """Overflows in the critic's second step; its optimizers are one with and one without momentum."""

    def __init__(self, bad: float = 1.0) -> None:
        super().__init__(toggle=True)
        self.bad, self.logged = bad, []

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        generating = bool(self.trainer.global_step % 2 == 0)
        self.logged.append(float(loss))
        super().manual_backward(loss if generating or self.trainer.global_step != 3 else loss * self.bad)


def _by_hand(rank: int, cases: list[tuple[int | None, str | None, float]], ranks: int) -> list[dict[str, Any]]:
    found = []
    for stage, precision, bad in cases:
        module = ByHand(bad)
        arguments: dict[str, Any] = {"max_epochs": 2}
        if stage is None:
            trainer = quiet(**arguments)
        elif precision is None:
            trainer = quiet(strategy=FiveD(ZeRO(stage=stage)), devices=ranks, **arguments)
        else:
            trainer = scaled(stage, ranks, LossScaling(1024.0), precision, **arguments)
        trainer.fit(module, Data())
        record: dict[str, Any] = {"weights": whole(module), "losses": module.logged}
        if precision is not None:
            record["skipped"] = trainer.strategy.skipped_steps.state_dict()
            record["scale"] = trainer.precision_plugin.scaler.scale
            momentum = trainer.optimizers[1].state
            record["steps"] = [float(s["step"]) for s in trainer.optimizers[0].state.values()]
            record["buffers"] = len(momentum)
        found.append(record)
    return found


def test_two_optimizers_by_hand_in_fp16_train_as_in_one_process(ranks: RankPool) -> None:
    (one,) = ranks(1, _by_hand, [(None, None, 1.0)], 1, **TRAINER, env={"WORLD_SIZE": None})[0]
    cases = [(stage, "16-mixed", 1.0) for stage in STAGES]
    for results in ranks(2, _by_hand, cases, 2, **TRAINER):
        for found in results:
            assert found["skipped"]["by_reason"] == {}
            for name, right in one["weights"].items():
                torch.testing.assert_close(found["weights"][name], right, rtol=2e-2, atol=1e-2, msg=name)


def test_an_overflow_skips_the_one_optimizer_that_has_it(ranks: RankPool) -> None:
    cases = [(stage, "16-mixed", float("inf")) for stage in STAGES]
    for results in ranks(2, _by_hand, cases, 2, **TRAINER):
        for found in results:
            last = {"step": 3, "reason": "loss scale", "scale": 1024.0, "optimizer_index": 1}
            assert found["skipped"]["last"] == last
            assert found["skipped"]["by_reason"] == {"loss scale": 1}
            assert found["scale"] == 512.0
            attempts = found["skipped"]["attempts"]
            assert set(found["steps"]) == {attempts / 2}
            assert all(bool(weight.isfinite().all()) for weight in found["weights"].values())


class BothFirst(L.LightningModule):
    """Both backwards come before both steps, the first of which overflows: the second's gradients wait meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        self.seen: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        one, other = self.optimizers()  # type: ignore[misc,attr-defined]
        one.zero_grad()
        other.zero_grad()
        bad = float("inf") if batch_idx == 0 else 1.0
        self.manual_backward(bad * self.first.sum() + 3.0 * self.second.sum())
        one.step()
        self.clip_gradients(other, gradient_clip_val=1.0, gradient_clip_algorithm="value")
        other.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([p], lr=1.0) for p in (self.first, self.second)]


def _both_first(rank: int, ranks: int) -> list[Any]:
    found = []
    for stage in STAGES:
        module = BothFirst()
        trainer = scaled(stage, ranks, LossScaling(1024.0))
        trainer.fit(module, repeated(2, ranks))
        scale = trainer.precision_plugin.scaler.scale
        found.append(({n: w.tolist() for n, w in whole(module).items()}, trainer.strategy.skipped_steps.total, scale))
    return found


def test_gradients_that_wait_for_their_step_follow_the_scale(ranks: RankPool) -> None:
    for found in one_and_same(ranks(2, _both_first, 2, **TRAINER)):
        assert found == ({"first": [-1.0, -1.0], "second": [-2.0, -2.0]}, 1, 512.0)


class ClippedAway(BothFirst):
    """Clips infinite gradients to finite ones before the step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        one, _ = self.optimizers()  # type: ignore[misc,attr-defined]
        self.manual_backward(float("inf") * self.first.sum())
        self.clip_gradients(one, gradient_clip_val=1.0, gradient_clip_algorithm="value")
        one.step()


def _bare(rank: int, kind: type) -> tuple[list[float], int]:
    module = kind()
    trainer = scaled(1, 2, LossScaling(1024.0))
    trainer.fit(module, repeated(1, 2))
    return whole(module)["first"].tolist(), trainer.strategy.skipped_steps.total


def test_an_overflow_is_not_clipped_away(ranks: RankPool) -> None:
    assert one_and_same(ranks(2, _bare, ClippedAway, **TRAINER)) == ([0.0, 0.0], 1)


class Adaptive(Line):
    """LBFGS evaluates its closure more than once."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def test_optimizers_that_do_not_go_with_a_precision_are_refused() -> None:
    for plugin, words in (
        (FiveDPrecision("16-mixed"), "LBFGS runs several backwards"),
        (FiveDPrecision("32-true", optimizer_state_dtype=torch.bfloat16), "LBFGS keeps lists"),
    ):
        trainer = quiet(strategy=FiveD(ZeRO(stage=0)), devices=1, plugins=plugin)
        with pytest.raises(MisconfigurationException, match=words):
            trainer.fit(Adaptive(), DataLoader(torch.ones(2, 1)))  # type: ignore[arg-type]

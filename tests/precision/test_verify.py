"""`verify` in every precision, and what it says of steps that overflow."""

import copy
from pathlib import Path

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_5d import FiveD, FiveDPrecision, LossScaling, ZeRO
from lightning_5d.verify import Parity, verify
from tests.modules import TinyLM, batches
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool

SEPARATE = {"backend": None, "timeout": 58.0}
PLUGINS = [
    FiveDPrecision("bf16-mixed"),
    FiveDPrecision("16-mixed"),
    FiveDPrecision("bf16-mixed", autocast=True),
    FiveDPrecision("16-mixed", autocast=True),
    FiveDPrecision("bf16-true"),
    FiveDPrecision("16-true"),
    FiveDPrecision("64-true"),
]


class Fused(TinyLM):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.trainer.precision == "16-true":  # where Adam's second moment underflows and its steps are chaotic
            return torch.optim.SGD(self.parameters(), lr=0.1)
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


class Biased(Fused):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * (1.0 + 0.1 * self.global_rank)


def _parities(
    rank: int, stage: int, plugins: list[FiveDPrecision], kind: type[TinyLM] = Fused, accumulate: int = 2
) -> list[Parity]:
    torch.set_num_threads(1)
    data = batches(12)
    return [
        verify(
            kind(),
            data,
            FiveD(ZeRO(stage=stage)),
            accumulate_grad_batches=accumulate,
            precision=copy.deepcopy(plugin),
            gradient_clip_val=0.5,
        )
        for plugin in plugins
    ]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_every_precision_passes(ranks: RankPool, stage: int) -> None:
    for plugin, result in zip(PLUGINS, ranks(2, _parities, stage, PLUGINS, **SEPARATE)[0], strict=True):
        assert result.passed, f"{plugin.precision}\n{result}"
        assert result.notes == ()
        if plugin.precision.endswith("mixed") and not plugin.autocast:
            assert max(row.difference for row in result.rows) < 1e-4, f"{plugin.precision}\n{result}"


def test_a_wrong_gradient_is_noticed_in_mixed_precision(ranks: RankPool) -> None:
    for result in ranks(2, _parities, 1, PLUGINS[:2], Biased, **SEPARATE)[0]:
        assert not result.passed


def test_steps_that_overflow_are_named_and_the_others_compared(ranks: RankPool) -> None:
    plugin = FiveDPrecision("16-mixed", loss_scaling=LossScaling(2.0**20, backoff_factor=2.0**-10))
    (result,) = ranks(2, _parities, 1, [plugin], **SEPARATE)[0]
    assert result.passed, f"\n{result}"
    assert "step 0 overflowed on both sides" in result.notes[0]
    endless = FiveDPrecision("16-mixed", loss_scaling=LossScaling(2.0**40))
    with pytest.raises(RankError, match="All 3 steps overflowed"):
        ranks(2, _parities, 1, [endless], **SEPARATE)


class Tied(TinyLM):
    def __init__(self) -> None:
        super().__init__(tied=True)


def test_a_step_at_the_edge_of_fp16_overflows_on_both_sides_or_on_none(ranks: RankPool) -> None:
    # The tied gradient is 0.95 x 65536 after the mean over the ranks, and more than fp16 holds before it.
    for stage in (0, 3):
        (result,) = ranks(2, _parities, stage, [FiveDPrecision("16-mixed")], Tied, 1, **SEPARATE)[0]
        assert result.passed, f"\n{result}"
        assert "step 0 overflowed on both sides" in result.notes[0]


def test_a_precision_of_lightnings_is_taken_over_with_its_scaler(tmp_path: Path) -> None:
    from lightning.pytorch.plugins.precision import MixedPrecision

    from tests.trainers import quiet

    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=7)
    trainer = quiet(strategy=FiveD(), devices=1, plugins=MixedPrecision("16-mixed", "cpu", scaler))
    plugin = trainer.precision_plugin
    assert isinstance(plugin, FiveDPrecision)
    assert plugin.scaler.settings == LossScaling(512.0, growth_interval=7)
    plugin.on_load_checkpoint({"MixedPrecision": {"scale": 64.0, "_growth_tracker": 3}})
    assert (plugin.scaler.scale, plugin.scaler.growth_tracker) == (64.0, 3)


@pytest.mark.parametrize(
    ("word", "precision"),
    [("bf16", "bf16-mixed"), (16, "16-mixed"), ("16-mixed", "16-mixed"), (64, "64-true"), (None, "32-true")],
)
def test_lightnings_short_words_mean_the_same_here(word: str | int | None, precision: str) -> None:
    assert FiveDPrecision(word).precision == precision


def test_what_does_not_go_together_is_listed() -> None:
    with pytest.raises(MisconfigurationException) as error:
        FiveDPrecision("8-true", loss_scaling="yes", optimizer_state_dtype="int8")  # type: ignore[arg-type]
    for words in ("3 settings", "'8-true' is not available", "32-true, bf16-mixed, 16-mixed", "'yes'", "int8"):
        assert words in str(error.value)
    with pytest.raises(MisconfigurationException, match="autocast=True says nothing for precision='bf16-true'"):
        FiveDPrecision("bf16-true", autocast=True)
    with pytest.raises(MisconfigurationException, match="'16-mixed', 'bf16-mixed'"):
        FiveDPrecision(["16-mixed", "bf16-mixed"])  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["16-mixed", "32-true"])
def test_the_plugin_without_the_strategy_is_refused(precision: str) -> None:
    from tests.trainers import quiet

    trainer = quiet(devices=1, plugins=FiveDPrecision(precision))
    with pytest.raises(MisconfigurationException, match=r"works under FiveD only.*strategy=FiveD"):
        trainer.fit(TinyLM(), batches(2))


def test_the_plugin_belongs_to_one_trainer() -> None:
    from tests.trainers import quiet

    plugin = FiveDPrecision("16-mixed", loss_scaling=LossScaling(2.0**10), optimizer_state_dtype="bfloat16")
    quiet(devices=2, strategy=FiveD(), plugins=plugin)
    with pytest.raises(MisconfigurationException, match=r"already belongs to another FiveD.*new FiveDPrecision"):
        quiet(devices=2, strategy=FiveD(), plugins=plugin)
    fresh = plugin.fresh()
    assert quiet(devices=2, strategy=FiveD(), plugins=fresh).scaler.scale == 2.0**10
    assert fresh.optimizer_state_dtype == torch.bfloat16


def test_fp16_scales_by_itself_and_others_only_when_asked() -> None:
    scales = {p: FiveDPrecision(p).scaler for p in ("32-true", "64-true", "bf16-true", "bf16-mixed")}
    assert all(scaler is None for scaler in scales.values())
    assert FiveDPrecision("16-mixed").scaler.scale == 65536.0
    assert FiveDPrecision("16-true").scaler.scale == 32768.0
    assert FiveDPrecision("16-mixed", loss_scaling=None).scaler is None
    assert FiveDPrecision("bf16-mixed", loss_scaling=LossScaling(4.0)).scaler.scale == 4.0


def test_the_strategy_may_bring_the_plugin() -> None:
    from tests.trainers import quiet

    trainer = quiet(strategy=FiveD(precision_plugin=FiveDPrecision("16-mixed")), devices=2)
    assert trainer.precision == "16-mixed"
    assert trainer.scaler is trainer.strategy.precision_plugin.scaler is not None

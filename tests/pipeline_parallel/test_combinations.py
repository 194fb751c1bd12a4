"""Precision, activation checkpointing and compiled blocks give the numbers of one process on stages, too."""

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_5d import FiveD, FiveDPrecision, PipelineParallel, ZeRO
from lightning_5d.checkpoint.full_state import gather
from lightning_5d.loss_scaling import LossScaling
from tests.modules import TinyLM, Tokens, batches
from tests.pipeline_parallel.recorded import fit, fit_alone, rows, worst
from tests.pipeline_parallel.zoo import HeadOnly
from tests.precision.reference import EPS, train
from tests.ranks.pool import RankPool
from tests.trainers import quiet

SEPARATE: dict[str, Any] = {"backend": None, "timeout": 60.0}
SCALING = LossScaling(init_scale=2.0**18, growth_interval=2)
MICROBATCHES, STEPS = 4, 4
# 16-bit sums depend on their order, and Adam makes whole steps of what is only rounding.
TOLERANCES = {"bf16-mixed": 1e-4, "16-mixed": 1e-4, "bf16-true": 3e-2}


class Careful(TinyLM):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=EPS)


class Watch(L.Callback):
    """What a run leaves, by step; of this rank's stages."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.scales: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        self.gradients.append(gather({n: p.grad for n, p in module.named_parameters()}, keep=True))

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        scaler = trainer.precision_plugin.scaler  # type: ignore[attr-defined]
        self.scales.append(1.0 if scaler is None else scaler.scale)


def fit_in(rank: int, settings: list[tuple[str, str, int]], data_ranks: int) -> list[Any]:
    found = []
    for precision, schedule, stage in settings:
        watch, module = Watch(), Careful()
        trainer = quiet(
            strategy=FiveD(PipelineParallel(2, schedule=schedule, microbatches=MICROBATCHES), ZeRO(stage=stage)),
            devices=2 * data_ranks,
            plugins=FiveDPrecision(precision, loss_scaling=SCALING if precision.startswith("16") else None),
            gradient_clip_val=0.5,
            use_distributed_sampler=False,
            callbacks=[watch],
        )
        trainer.fit(module, DataLoader(Tokens(2 * MICROBATCHES * STEPS), batch_size=2 * MICROBATCHES))
        weights = gather(dict(module.named_parameters()), keep=True)
        found.append((watch.losses, watch.scales, watch.gradients, weights))
    return found


def test_every_precision_equals_one_process(ranks: RankPool) -> None:
    settings = [(precision, schedule, 1) for precision in TOLERANCES for schedule in ("1f1b", "zb_h1")]
    found = ranks(2, fit_in, settings, 1, **SEPARATE)
    torch.set_num_threads(1)  # as the ranks: sums in 16 bits depend on how they are cut
    for index, setting in enumerate(settings):
        precision = setting[0]
        tolerance = TOLERANCES[precision]
        scaled = {"scale": SCALING.init_scale, "growth_interval": SCALING.growth_interval}
        right = train(
            precision,
            batches(MICROBATCHES * STEPS),
            1,
            MICROBATCHES,
            0.5,
            **scaled if precision == "16-mixed" else {},  # type: ignore[arg-type]
        )
        weights: dict[str, Tensor] = {}
        for losses, scales, gradients, its_weights in (each[index] for each in found):
            assert losses == [pytest.approx(loss, rel=tolerance) for loss in right.losses], setting
            assert scales == right.scales
            for one, other in zip(gradients, right.gradients, strict=True):
                mine = {name: other[name] for name in one}
                if all(bool(grad.isfinite().all()) for grad in other.values()):
                    assert apart(one, mine) <= tolerance, setting
            weights |= its_weights
        assert weights.keys() == right.weights.keys()
        assert apart(weights, right.weights) <= 10 * tolerance, setting


def apart(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert all(found[name].dtype == tensor.dtype for name, tensor in right.items())
    return max(
        float((found[name].double() - tensor.double()).abs().max() / tensor.double().abs().max().clamp(min=1e-6))
        for name, tensor in right.items()
    )


class Compiled(TinyLM):
    """Every second block is compiled in place, the others by a wrapper."""

    def __init__(self) -> None:
        super().__init__(layers=5)
        for index, block in enumerate(list(self.layers)):
            if index % 2:
                block.compile(backend="aot_eager")
            else:
                self.layers[index] = torch.compile(block, backend="aot_eager")  # type: ignore[assignment]


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_activation_checkpointing_equals_one_process(ranks: RankPool, schedule: str, checkpointing: str) -> None:
    strategy = partial(
        FiveD, PipelineParallel(2, schedule=schedule, microbatches=4), activation_checkpointing=checkpointing
    )
    compare(ranks, partial(TinyLM, layers=5), strategy)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_compiled_blocks_equal_one_process(ranks: RankPool, schedule: str) -> None:
    compare(ranks, Compiled, partial(FiveD, PipelineParallel(2, schedule=schedule, microbatches=4)))


def compare(ranks: RankPool, module: Any, strategy: Any) -> None:
    data = partial(rows, 16, 8)
    found = ranks(2, partial(fit, module=module, data=data, strategy=strategy, ranks=2), **SEPARATE)
    differences = worst(found, fit_alone(module, data))
    assert max(differences.values()) < 1e-5, differences


def test_a_stage_without_trained_weights_takes_part_in_loss_scaling(ranks: RankPool) -> None:
    """The scale begins too high, so the first stage has to leave steps out because the last one does."""
    plugin = partial(FiveDPrecision, "16-mixed", loss_scaling=LossScaling(init_scale=2.0**24))
    pipeline = partial(FiveD, PipelineParallel(2, microbatches=4, split=[2, 2]))
    data = partial(rows, 32, 8)
    first, last = ranks(2, partial(fit_scaled, data=data, strategy=pipeline, ranks=2, plugin=plugin), **SEPARATE)
    (alone,) = ranks(1, partial(fit_scaled, data=data, strategy=FiveD, ranks=1, plugin=plugin), **SEPARATE)
    assert first["scale"] == last["scale"] == alone["scale"] < 2.0**24
    assert first["skipped"] == last["skipped"] == alone["skipped"] > 0
    assert first["losses"] == last["losses"] == pytest.approx(alone["losses"], rel=1e-3)
    assert not first["gradients"][0]
    assert apart(first["parameters"] | last["parameters"], alone["parameters"]) < 1e-3


def fit_scaled(rank: int, plugin: Any, **arguments: Any) -> dict[str, Any]:
    made = plugin()
    found = fit(rank, HeadOnly, plugins=made, **arguments)
    return {**found, "scale": made.scaler.scale, "skipped": made._strategy.skipped_steps.total}

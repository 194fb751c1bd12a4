"""Runs in half precisions: how far their gradients are from exact ones, and what an overflow on one rank does."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_5d import FiveD, FiveDPrecision, LossScaling, Parallelism
from tests.tensor_parallel.parity import Dealt, Rows, decoder, fit
from tests.trainers import quiet

HALVES = ["bf16-mixed", "16-mixed", "bf16-true", "16-true"]


def _deal() -> Dealt:
    return Dealt(Rows(4, 6), 4)


def gradients(rank: int, plugins: Sequence[Parallelism], devices: int, precisions: Sequence[str]) -> list[Any]:
    """What the first backward gives in each precision."""
    found = []
    for precision in precisions:
        plugin = FiveDPrecision(precision, loss_scaling=LossScaling(256.0) if precision == "16-mixed" else None)
        strategy = partial(FiveD, *plugins)
        run = fit(rank, decoder(), _deal, strategy, devices=devices, plugins=plugin, limit_val_batches=0)
        found.append({name: value.double() for name, value in run["gradients"][0].items()} if rank == 0 else None)
    return found


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """How far all gradients together are from exact ones, relative to these."""
    together = [torch.cat([each[name].flatten() for name in exact]) for each in (found, exact)]
    return float((together[0] - together[1]).norm() / together[1].norm())


class Overflow(L.Callback):
    """Makes one gradient infinite on one rank of an axis, in the second step."""

    def __init__(self) -> None:
        self.scales: list[float] = []

    def on_after_backward(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_step == 1 and not self.scales[1:]:
            grad: Any = module.get_parameter("decoder.layers.0.mlp.up_proj.weight").grad
            if trainer.global_rank == 1:
                (grad.to_local() if isinstance(grad, DTensor) else grad).fill_(torch.inf)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.scales.append(trainer.precision_plugin.scaler.scale)  # type: ignore[union-attr]


def overflow(rank: int, *plugins: Parallelism) -> dict[str, Any]:
    """A run of four steps on two ranks, the second of which overflows: its scales and what became of the weights."""
    seen = Overflow()
    plugin = FiveDPrecision("16-mixed", loss_scaling=LossScaling(init_scale=1024.0))
    strategy = FiveD(*plugins)
    arguments: dict[str, Any] = {"use_distributed_sampler": False, "limit_val_batches": 0}
    trainer = quiet(strategy=strategy, devices=2, plugins=plugin, callbacks=[seen], **arguments)
    trainer.fit(decoder()(), datamodule=Dealt(Rows(16, 6), 4))
    parameters = strategy.full_state_dict()
    finite = all(bool(value.isfinite().all()) for value in parameters.values() if not value.is_meta)
    return {"scales": seen.scales, "skipped": strategy.skipped_steps.total, "finite": finite}

"""Precisions under the tensor axis: as in one process of the same precision, within what the dtype allows."""

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch

from lightning_5d import FiveD, FiveDPrecision, LossScaling, TensorParallel, ZeRO
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, Dealt, Rows, compare, decoder
from tests.trainers import quiet

# Lightning, alone, does not clip before a fused optimizer in mixed precision.
UNCLIPPED: dict[str, Any] = {"gradient_clip_val": None}
SEQUENCE = pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp+sp"])


@SEQUENCE
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16-mixed", 0.05), ("bf16-true", 0.1), ("64-true", 1e-5)])
def test_a_run_is_that_of_one_process(ranks: RankPool, precision: str, tolerance: float, sequence: bool) -> None:
    tensor = TensorParallel(2, sequence_parallel=sequence)
    compare(
        ranks,
        decoder(),
        tensor,
        ZeRO(stage=1),
        world=4,
        precision=precision,
        tolerance=tolerance,
        floor=1e-2,
        **UNCLIPPED,
    )


class Overflow(L.Callback):
    """Makes one gradient infinite on one rank of the tensor axis, in the second step."""

    def __init__(self) -> None:
        self.scales: list[float] = []

    def on_after_backward(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_step == 1 and not self.scales[1:]:
            grad: Any = module.get_parameter("decoder.layers.0.mlp.up_proj.weight").grad
            if trainer.global_rank == 1:
                grad.to_local().fill_(torch.inf)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.scales.append(trainer.precision_plugin.scaler.scale)  # type: ignore[union-attr]


def _overflow(rank: int, sequence: bool) -> dict[str, Any]:
    seen = Overflow()
    plugin = FiveDPrecision("16-mixed", loss_scaling=LossScaling(init_scale=1024.0))
    strategy = FiveD(TensorParallel(2, sequence_parallel=sequence))
    trainer = quiet(strategy=strategy, devices=2, plugins=plugin, callbacks=[seen], use_distributed_sampler=False)
    trainer.fit(decoder()(), datamodule=Dealt(Rows(16, 6), 4))
    parameters = strategy.full_state_dict()
    finite = all(bool(value.isfinite().all()) for value in parameters.values() if not value.is_meta)
    return {"scales": seen.scales, "skipped": strategy.skipped_steps.total, "finite": finite}


@SEQUENCE
def test_an_overflow_on_one_rank_is_left_out_by_all(ranks: RankPool, sequence: bool) -> None:
    found = ranks(2, partial(_overflow, sequence=sequence), **SEPARATE)
    assert found[0] == found[1]
    assert found[0]["scales"] == [1024.0, 512.0, 512.0, 512.0]
    assert found[0]["finite"]

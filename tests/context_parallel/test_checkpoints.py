"""Checkpoints go from any layout with cut sequences to any other, and training goes on as if nothing had happened."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_5d import ContextParallel, FiveD, Parallelism, PipelineParallel, TensorParallel, ZeRO
from tests.checkpoint.same import assert_same
from tests.context_parallel.test_joined_data import steady
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, Dealt, Rows
from tests.trainers import quiet

LAYOUTS: list[tuple[Parallelism, ...]] = [
    (ContextParallel(2), ZeRO(stage=3)),
    (ContextParallel(4, method="ulysses"),),
    (),
    (ContextParallel(2), ZeRO(stage=1)),
    (TensorParallel(2, sequence_parallel=True), ContextParallel(2, method="all_gather")),
    (PipelineParallel(2, microbatches=2), ContextParallel(2)),
]


class Losses(L.Callback):
    """Keeps the mean over the data ranks."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: dict[str, Tensor], *_: Any) -> None:
        self.found.append(float(trainer.strategy.reduce(outputs["loss"], reduce_op="mean")))


def _epoch(rank: int, path: Path, number: int, plugins: tuple[Parallelism, ...]) -> list[float]:
    """One more epoch in this layout, from where the last one ended."""
    losses = Losses()
    chosen: Any = {"strategy": FiveD(*plugins), "devices": 4} if plugins else {"devices": 1}
    trainer = quiet(use_distributed_sampler=False, max_epochs=number, callbacks=[losses], **chosen)
    data = Dealt(Rows(16, 10), 8)
    trainer.fit(steady(), datamodule=data, ckpt_path=path if path.exists() else None)
    trainer.save_checkpoint(path)
    return losses.found


@pytest.mark.timeout(400)
def test_a_run_changes_its_layout_after_every_epoch(ranks: RankPool, tmp_path: Path) -> None:
    path, alone = tmp_path / "changing.ckpt", tmp_path / "alone.ckpt"
    for number, plugins in enumerate(LAYOUTS, 1):
        expected = _epoch(0, alone, number, ())
        call = partial(_epoch, path=path, number=number, plugins=plugins)
        for found in ranks(4, call, **SEPARATE) if plugins else [call(0)]:
            assert found == pytest.approx(expected, rel=1e-5), plugins
        assert_same(torch.load(path, weights_only=True), torch.load(alone, weights_only=True))

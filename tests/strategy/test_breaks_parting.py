"""Ranks that part ways: nobody waits longer than `FiveD(timeout=...)`."""

import time
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_5d import FiveD, ZeRO
from tests.modules import TinyLM, loader
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.trainers import quiet


class OneStops(Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.should_stop |= trainer.global_rank == 1


class OneCallsTwice(TinyLM):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.loss(batch) if self.global_rank == 1 else loss


def _fit(rank: int, kind: type[TinyLM], callbacks: list[Callback], stage: int) -> None:
    strategy = FiveD(ZeRO(stage=stage), timeout=1)
    quiet(strategy=strategy, devices=2, callbacks=callbacks).fit(kind(), loader(16), loader(4))


@pytest.mark.parametrize(("kind", "callbacks"), [(TinyLM, [OneStops()]), (OneCallsTwice, [])])
def test_ranks_that_part_ways_end_when_the_time_limit_of_a_collective_has_passed(
    ranks: RankPool, kind: type[TinyLM], callbacks: list[Callback]
) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"has waited 1 s for rank|Timed out waiting 1000ms|failed first"):
        ranks(2, _fit, kind, callbacks, 3, backend=None, timeout=30.0)
    assert time.monotonic() - started < 20

"""Ranks that part ways: nobody waits longer than `FiveD(timeout=...)`."""

import time

import pytest
from torch import Tensor

from lightning_5d import FiveD, ZeRO
from tests.modules import TinyLM, loader
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.trainers import quiet


class OneCallsTwice(TinyLM):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.loss(batch) if self.global_rank == 1 else loss


def _fit(rank: int) -> None:
    quiet(strategy=FiveD(ZeRO(stage=3), timeout=1), devices=2).fit(OneCallsTwice(), loader(16), loader(4))


def test_ranks_that_part_ways_end_when_the_time_limit_of_a_collective_has_passed(ranks: RankPool) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"has waited 1 s for rank|Timed out waiting 1000ms|failed first"):
        ranks(2, _fit, backend=None, timeout=30.0)
    assert time.monotonic() - started < 30

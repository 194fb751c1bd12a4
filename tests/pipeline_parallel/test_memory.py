"""What a stage keeps between a forward and its backward."""

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_5d import FiveD, PipelineParallel
from tests.modules import TinyLM
from tests.pipeline_parallel.recorded import rows
from tests.ranks.pool import RankPool
from tests.trainers import quiet


class Watched(nn.Module):
    """Adds its weight to what it gets: nothing of the result is needed in backward."""

    alive: list[int]

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(width))
        self.results: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.counts = [*getattr(self, "counts", []), sum(ref() is not None for ref in self.results)]
        y = x + self.shift
        self.results.append(weakref.ref(y))
        return y


class Shifting(TinyLM):
    def __init__(self) -> None:
        super().__init__(layers=4)
        self.layers = nn.ModuleList(Watched(8) for _ in range(4))


def _run(rank: int, schedule: str) -> list[int]:
    module = Shifting()
    strategy = FiveD(PipelineParallel(2, schedule=schedule, microbatches=8, split=[2, 2]))
    quiet(strategy=strategy, devices=2, use_distributed_sampler=False, max_steps=2).fit(module, rows(16, 8))
    last = module.layers[1 if rank == 0 else 3]
    return list(getattr(last, "counts", []))


def test_a_result_that_was_sent_is_not_kept(ranks: RankPool) -> None:
    for schedule in ("afab", "1f1b", "zb_h1"):
        first, last = ranks(2, partial(_run, schedule=schedule), backend=None, timeout=40.0)
        assert len(first) == 16  # two steps of eight microbatches
        assert max(first) <= 1, (schedule, first)
        assert len(last) == 16

"""A Trainer that is gone, and what it held."""

import gc
import os
import time
from typing import Any

import pytest

from lightning_5d import ContextParallel, ExpertParallel, FiveD, PipelineParallel, TensorParallel, ZeRO
from lightning_5d.communication import destroy_process_groups
from tests.expert_parallel.test_training import mixture
from tests.ranks.pool import RankPool
from tests.ranks.state import event_loops
from tests.tensor_parallel.parity import Dealt, Rows, decoder
from tests.trainers import quiet

LAYOUTS: dict[str, tuple[Any, ...]] = {
    "stage 0": (ZeRO(stage=0),),
    "stage 3": (ZeRO(stage=3),),
    "tensor": (ZeRO(stage=1), TensorParallel(2)),
    "pipeline": (PipelineParallel(2, microbatches=2),),
    "context": (ContextParallel(2),),
    "expert": (ExpertParallel(2), ZeRO(stage=1)),
}


def _left(rank: int, names: list[str]) -> dict[str, int]:
    left = {}
    for name in names:
        module = mixture() if name == "expert" else decoder()
        quiet(strategy=FiveD(*LAYOUTS[name]), devices=2, max_steps=2).fit(module(), Dealt(Rows(8, 6), 4))
        assert event_loops() > 0
        destroy_process_groups()
        del module
        limit = time.monotonic() + 60
        while (count := event_loops()) and time.monotonic() < limit:
            gc.collect()
        left[name] = count
    return left


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs the list of threads that Linux has")
@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_keeps_the_process_groups_of_a_trainer_that_is_gone(ranks: RankPool, name: str) -> None:
    assert ranks(2, _left, [name], backend=None, timeout=50.0) == [{name: 0}] * 2

"""The same claims on accelerators; skipped where there are none."""

import pytest
import torch

from lightning_5d import FiveD, ZeRO
from lightning_5d.verify import Parity, verify
from tests.modules import TinyLM, batches
from tests.ranks.pool import RankPool

COUNT = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT == 0, reason="no accelerator")]


def _verify(rank: int, ranks: int, stage: int, accumulate: int) -> Parity:
    data = batches(3 * ranks * accumulate)
    return verify(
        TinyLM(),
        data,
        FiveD(ZeRO(stage=stage)),
        devices=ranks,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
        accelerator="gpu",
        tolerance=1e-4,
    )


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_stage_equals_one_process(ranks: RankPool, world: int, stage: int, accumulate: int) -> None:
    if world > COUNT:
        pytest.skip(f"{COUNT} accelerators for {world} ranks")
    results = ranks(world, _verify, world, stage, accumulate, backend=None, timeout=55.0)
    assert results[0].passed, "\n" + results[0].table()

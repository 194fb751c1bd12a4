"""Callbacks and `verify` with cut sequences: a batch counts once, and work is that of one process."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import default_collate

from lightning_5d import ContextParallel, FiveD, Parallelism, ZeRO
from lightning_5d.callbacks import GradientClipping, LossPlot, MemoryProfiler, Throughput
from lightning_5d.memory import MemoryRecord
from lightning_5d.verify import verify
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, Dealt, Rows, decoder
from tests.trainers import quiet

TOKENS = 16


def _watched(rank: int, plugins: Sequence[Parallelism], folder: Path) -> dict[str, Any]:
    chosen: dict[str, Any] = {"strategy": FiveD(*plugins), "devices": 4} if plugins else {"devices": 1}
    throughput, clipping = Throughput(peak=1e9), GradientClipping(max_norm=0.3, groups=["*attn*"])
    plot, profiler = LossPlot(folder / "loss.png"), MemoryProfiler(folder, steps=2, pictures=False)
    callbacks = [throughput, clipping, plot, profiler]
    trainer = quiet(callbacks=callbacks, use_distributed_sampler=False, **chosen)
    trainer.fit(decoder()(), datamodule=Dealt(Rows(16, TOKENS), 4))
    logged = trainer.callback_metrics
    names = ["gradient_norm", "gradient_norm_clipped", "gradient_clipped_share", "gradient_norm/*attn*", "val_loss"]
    return {"totals": throughput.totals, **{name: float(logged[name]) for name in names}}


LAYOUTS = {
    "ring": (ContextParallel(2), ZeRO(stage=1)),
    "ulysses": (ContextParallel(4, method="ulysses"),),
    "all_gather": (ContextParallel(2, method="all_gather"), ZeRO(stage=3)),
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What one process counts, and its files."""
    folder = tmp_path_factory.mktemp("one")
    return _watched(0, (), folder), folder


def _activations(folder: Path, rank: int) -> float:
    return MemoryRecord.load(folder / f"memory_rank{rank}.json").at_end("forward", 2)["activations"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_callbacks_say_is_that_of_one_process(
    ranks: RankPool, tmp_path: Path, one: tuple[dict[str, Any], Path], name: str
) -> None:
    expected, folder = one
    assert expected["totals"]["samples"] == 16
    assert expected["totals"]["tokens"] == 16 * TOKENS
    for rank, found in enumerate(ranks(4, partial(_watched, plugins=LAYOUTS[name], folder=tmp_path), **SEPARATE)):
        assert found["totals"] == pytest.approx(expected["totals"]), "a batch of all ranks counts once"
        for key in expected.keys() - {"totals"}:
            assert found[key] == pytest.approx(expected[key], rel=1e-4), key
        # A quarter of the tokens of each step are on each rank.
        assert _activations(tmp_path, rank) < 0.4 * _activations(folder, 0)
    assert (tmp_path / "loss.png").stat().st_size > 0


def _verified(rank: int, precision: str) -> list[Any]:
    rows = Rows(16, 13)
    batches = [default_collate([rows[2 * i], rows[2 * i + 1]]) for i in range(8)]
    results = []
    for strategy in (FiveD(ContextParallel(2)), FiveD(ContextParallel(2, method="ulysses"))):
        # As far apart as with cut layers: a model this small rounds its norms' gradients by as much in sixteen bits.
        options: dict[str, Any] = {"tolerance": 0.1} if precision == "bf16-mixed" else {}
        parity = verify(
            decoder()(), batches, strategy, devices=4, precision=precision, gradient_clip_val=0.5, **options
        )
        results.append(parity.passed or str(parity))
    return results


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_verify_compares_with_one_process(ranks: RankPool, precision: str) -> None:
    for found in ranks(4, _verified, precision, **SEPARATE):
        assert found == [True, True], found

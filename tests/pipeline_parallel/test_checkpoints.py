"""Stages of a real pipeline: tied weights, two copies, checkpoints that go from one layout to another, and `verify`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_5d import FiveD, PipelineParallel, ZeRO
from lightning_5d.verify import verify
from tests.checkpoint.same import assert_same
from tests.modules import TinyLM
from tests.pipeline_parallel.recorded import rows
from tests.ranks.pool import RankPool
from tests.trainers import quiet

TRAINER: dict[str, Any] = {"backend": None, "timeout": 60}
ALONE: dict[str, Any] = {"backend": None, "timeout": 60, "env": {"WORLD_SIZE": None}}


class Named(TinyLM):
    """Groups by name; in one process the head's weight has the embedding's name."""

    def configure_optimizers(self) -> Any:
        kept = [p for name, p in self.named_parameters() if "norm" in name or name.startswith("embed")]
        rest = [p for name, p in self.named_parameters() if "norm" not in name and not name.startswith("embed")]
        return torch.optim.AdamW([{"params": rest}, {"params": kept, "weight_decay": 0.0}], lr=1e-2, weight_decay=0.3)


def _train(rank: int, layout: dict[str, Any] | None, path: str, epochs: int, resume: str | None) -> list[float]:
    if layout is None:
        trainer = quiet(devices=1, max_epochs=epochs)
        data = rows(16, 8)
    else:
        options = dict(layout)
        data_ranks, stage = options.pop("data_ranks", 1), options.pop("stage", 1)
        plugins = [PipelineParallel(microbatches=4, **options)] if options else []
        size = options.get("size", 1) * data_ranks
        trainer = quiet(
            strategy=FiveD(*plugins, ZeRO(stage=stage)), devices=size, max_epochs=epochs, use_distributed_sampler=False
        )
        data = rows(16, 8, data_ranks, rank % data_ranks)
    module = Named(layers=5, tied=True, seed=9 if resume else 0)
    trainer.fit(module, data, ckpt_path=resume)
    trainer.save_checkpoint(path)
    if layout is None:
        return []
    shared = getattr(trainer.strategy.parallelized[0], "shared_weights", None)  # type: ignore[attr-defined]
    if shared is not None:
        shared.check_equal()
    return []


def _saved(
    ranks: RankPool, path: Path, layout: dict[str, Any] | None, epochs: int = 1, resume: Path | None = None
) -> Any:
    size = 1 if layout is None else layout.get("size", 1) * layout.get("data_ranks", 1)
    options = ALONE if layout is None else TRAINER
    ranks(size, _train, layout, str(path), epochs, None if resume is None else str(resume), **options)
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def one(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """One process: its checkpoint after one epoch, read, and that after a second."""
    folder = tmp_path_factory.mktemp("one")
    first = _saved(rank_pool, folder / "first.ckpt", None)
    return folder / "first.ckpt", first, _saved(rank_pool, folder / "second.ckpt", None, 2, folder / "first.ckpt")


LAYOUTS: list[dict[str, Any]] = [
    {"size": 2},
    {"size": 2, "schedule": "interleaved_1f1b", "chunks": 2},
    {"size": 2, "data_ranks": 2, "stage": 3},
    {"size": 2, "data_ranks": 2, "stage": 1, "schedule": "zb_v"},
    {"size": 4, "schedule": "dualpipe", "stage": 0},
    {"size": 2, "data_ranks": 2, "stage": 2, "schedule": "dualpipe"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())))
def test_a_tied_model_is_saved_and_resumed_as_in_one_process(
    ranks: RankPool, tmp_path: Path, one: tuple[Path, Any, Any], layout: dict[str, Any]
) -> None:
    path, first, second = one
    assert_same(_saved(ranks, tmp_path / "first.ckpt", layout), first)
    assert_same(_saved(ranks, tmp_path / "second.ckpt", layout, 2, path), second)
    assert_same(_saved(ranks, tmp_path / "same.ckpt", layout, 2, tmp_path / "first.ckpt"), second)
    other = None if layout["size"] == 4 else {"data_ranks": 2, "stage": 2}
    assert_same(_saved(ranks, tmp_path / "other.ckpt", other, 2, tmp_path / "first.ckpt"), second)


def _verified(rank: int, devices: int, stage: int, pipeline: PipelineParallel) -> Any:
    batches = list(rows(48, 8))
    return verify(
        TinyLM(layers=5, tied=True), batches, FiveD(pipeline, ZeRO(stage=stage)), devices=devices, gradient_clip_val=0.5
    )


@pytest.mark.parametrize(("devices", "stage", "schedule"), [(2, 0, "1f1b"), (4, 3, "zb_h1"), (4, 1, "dualpipe")])
def test_verify_compares_all_stages(ranks: RankPool, devices: int, stage: int, schedule: str) -> None:
    pipeline = PipelineParallel(2, schedule=schedule, microbatches=4)
    for parity in ranks(devices, _verified, devices, stage, pipeline, **TRAINER):
        assert parity.passed, parity.table()
        assert parity.steps == 6 // (devices // 2)

"""The files of a run over the tensor axis are those of one process, whatever the layout that wrote or reads them."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_5d import FiveD, PipelineParallel, ZeRO
from tests.pipeline_parallel.recorded import rows
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parted import Parted, Parts
from tests.trainers import quiet

TRAINER: dict[str, Any] = {"backend": None, "timeout": 60}
ALONE: dict[str, Any] = {"backend": None, "timeout": 60, "env": {"WORLD_SIZE": None}}

Layout = tuple[int, int, int, int]
"""Sizes of pp, dp and tp, and the ZeRO stage."""

ONE: Layout = (1, 1, 1, 0)


def _trainer(layout: Layout, **arguments: Any) -> L.Trainer:
    pp, dp, tp, stage = layout
    if layout == ONE:
        return quiet(devices=1, **arguments)
    plugins = [*([PipelineParallel(pp, microbatches=2)] if pp > 1 else []), *([Parts(tp)] if tp > 1 else [])]
    strategy = FiveD(*plugins, ZeRO(stage=stage))
    return quiet(strategy=strategy, devices=pp * dp * tp, use_distributed_sampler=False, **arguments)


def _train(rank: int, layout: Layout, path: str, epochs: int, resume: str | None, frozen: tuple[str, ...]) -> None:
    trainer = _trainer(layout, max_epochs=epochs)
    _, dp, tp, _ = layout
    module = Parted(layers=4, seed=5 if resume else 0, frozen=frozen)
    trainer.fit(module, rows(8, 4, dp, rank // tp % dp), ckpt_path=resume)
    trainer.save_checkpoint(path)


def _saved(
    ranks: RankPool, path: Path, layout: Layout, epochs: int = 1, resume: Path | None = None, frozen: Any = ()
) -> Any:
    pp, dp, tp, _ = layout
    options = ALONE if layout == ONE else TRAINER
    ranks(pp * dp * tp, _train, layout, str(path), epochs, None if resume is None else str(resume), frozen, **options)
    return torch.load(path, weights_only=True)


def _same(found: Any, expected: Any) -> None:
    assert list(found["state_dict"]) == list(expected["state_dict"])
    torch.testing.assert_close(found["state_dict"], expected["state_dict"], rtol=1e-5, atol=1e-6)
    (mine,), (theirs,) = found["optimizer_states"], expected["optimizer_states"]
    assert mine["param_groups"] == theirs["param_groups"]
    assert sorted(mine["state"]) == sorted(theirs["state"])
    for number, entries in theirs["state"].items():
        torch.testing.assert_close(mine["state"][number], entries, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def one(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """One process: its checkpoint after one epoch, read, and that after a second."""
    folder = tmp_path_factory.mktemp("one")
    first = _saved(rank_pool, folder / "first.ckpt", ONE)
    return folder / "first.ckpt", first, _saved(rank_pool, folder / "second.ckpt", ONE, 2, folder / "first.ckpt")


LAYOUTS: dict[str, tuple[Layout, Layout]] = {
    "tp2xpp2-to-dp4": ((2, 1, 2, 1), (1, 4, 1, 1)),
    "tp4-to-pp4": ((1, 1, 4, 0), (4, 1, 1, 0)),
    "dp2xtp2-to-one": ((1, 2, 2, 3), ONE),
    "dp4-to-tp2xpp2": ((1, 4, 1, 2), (2, 1, 2, 0)),
    "tp2xpp2xdp2-to-tp4": ((2, 2, 2, 3), (1, 1, 4, 1)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_goes_from_any_layout_to_any(
    ranks: RankPool, tmp_path: Path, one: tuple[Path, Any, Any], name: str
) -> None:
    path, first, second = one
    writer, reader = LAYOUTS[name]
    _same(_saved(ranks, tmp_path / "first.ckpt", writer), first)
    _same(_saved(ranks, tmp_path / "second.ckpt", reader, 2, tmp_path / "first.ckpt"), second)
    if reader != ONE:
        _same(_saved(ranks, tmp_path / "from-one.ckpt", reader, 2, path), second)

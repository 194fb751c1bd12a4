"""Lightning with experts on other ranks: whatever a user sees of a run is what one process shows."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_5d import ExpertParallel, FiveD, ZeRO
from tests.expert_parallel.routed import Block
from tests.pipeline_parallel.test_lightning import table_in, without_steps
from tests.pipeline_parallel.test_sharing import ONE, TRAINER, close
from tests.pipeline_parallel.whole_runs import Model, whole_run
from tests.ranks.pool import RankPool
from tests.trainers import quiet


def _trainer(plugins: tuple[Any, ...], world: int, **arguments: Any) -> L.Trainer:
    strategy = {"strategy": FiveD(*plugins)} if plugins else {}
    return quiet(devices=world, use_distributed_sampler=False, **strategy, **arguments)


def _everything(rank: int, plugins: tuple[Any, ...], world: int, folder: str) -> dict[str, Any]:
    module = Model(plateau=True)
    torch.manual_seed(5)
    module.layers = nn.ModuleList(Block(4, 2) for _ in range(2))
    return whole_run(module, partial(_trainer, plugins, world), folder, rank, world)


@pytest.fixture(scope="module")
def one(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """What one process shows, and its log."""
    folder = tmp_path_factory.mktemp("one")
    return rank_pool(1, _everything, (), 1, str(folder), **ONE)[0], table_in(folder)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_shows_what_one_process_shows(
    ranks: RankPool, tmp_path: Path, one: tuple[dict[str, Any], Any], stage: int
) -> None:
    expected, table = one
    assert 1 < expected["epochs"] < 8, "one process stops early"
    found = ranks(2, _everything, (ExpertParallel(2), ZeRO(stage=stage)), 2, str(tmp_path), **TRAINER)
    agreed = ["epochs", "steps", "stopped", "best", "kept", "files", "bar", "rates", "validate", "test"]
    for each in found:
        close({name: each[name] for name in agreed}, {name: expected[name] for name in agreed})
    close(without_steps(table_in(tmp_path)), without_steps(table))
    for loader, batches in enumerate(expected["predict"]):
        for number, batch in enumerate(batches):
            parts = [each["predict"][loader][number]["logits"] for each in found]
            close([*parts[0], *parts[1]], batch["logits"])

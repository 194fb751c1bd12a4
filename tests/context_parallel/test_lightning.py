"""Lightning with cut sequences: whatever a user sees of a run is what one process shows."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_5d import ContextParallel, FiveD, ZeRO
from tests.context_parallel.layers_on_a_module import with_attention
from tests.context_parallel.test_training import METHODS
from tests.pipeline_parallel.test_lightning import table_in, without_steps
from tests.pipeline_parallel.test_sharing import ONE, TRAINER, close
from tests.pipeline_parallel.whole_runs import Model, whole_run
from tests.ranks.pool import RankPool
from tests.trainers import quiet


def _trainer(plugins: tuple[Any, ...], world: int, **arguments: Any) -> L.Trainer:
    strategy = {"strategy": FiveD(*plugins)} if plugins else {}
    return quiet(devices=world, use_distributed_sampler=False, **strategy, **arguments)


def _everything(rank: int, plugins: tuple[Any, ...], world: int, folder: str) -> dict[str, Any]:
    cut = plugins[0].size if plugins else 1
    module: Any = with_attention(Model, plateau=True)
    found = whole_run(module, partial(_trainer, plugins, world), folder, rank // cut, world // cut)
    halves = {"ring": {4}, "ulysses": {3, 4}}  # padded to multiples of 4 and of 2
    assert module.layers[0].seen == (halves[plugins[0].method] if plugins else {6, 7})
    return found


@pytest.fixture(scope="module")
def one(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """What one process shows, and its log."""
    folder = tmp_path_factory.mktemp("one")
    return rank_pool(1, _everything, (), 1, str(folder), **ONE)[0], table_in(folder)


@pytest.mark.parametrize("method", ["ring zigzag", "ulysses"])
def test_a_run_with_cut_sequences_shows_what_one_process_shows(
    ranks: RankPool, tmp_path: Path, one: tuple[dict[str, Any], Any], method: str
) -> None:
    expected, table = one
    assert 1 < expected["epochs"] < 8, "one process stops early"
    assert len(expected["files"]) == 2, "and has removed a checkpoint"
    plugins = (ContextParallel(2, **METHODS[method]),)
    for found in ranks(2, _everything, plugins, 2, str(tmp_path), **TRAINER):
        close(found, expected)
    close(table_in(tmp_path), table)


def test_a_run_with_data_ranks_shows_what_one_process_shows(
    ranks: RankPool, tmp_path: Path, one: tuple[dict[str, Any], Any]
) -> None:
    expected, table = one
    found = ranks(4, _everything, (ContextParallel(2), ZeRO(stage=3)), 4, str(tmp_path), **TRAINER)
    agreed = ["epochs", "steps", "stopped", "best", "kept", "files", "bar", "rates", "validate", "test"]
    for each in found:
        close({name: each[name] for name in agreed}, {name: expected[name] for name in agreed})
    close(found[1], found[0])
    close(found[3], found[2])
    close(without_steps(table_in(tmp_path)), without_steps(table))
    for loader, batches in enumerate(expected["predict"]):
        for number, batch in enumerate(batches):
            parts = [found[rank]["predict"][loader][number]["logits"] for rank in (0, 2)]
            close([*parts[0], *parts[1]], batch["logits"])

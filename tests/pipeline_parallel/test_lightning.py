"""Lightning on every stage: whatever a user sees of a run is what one process shows."""

import csv
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline_parallel.recorded import worst
from tests.pipeline_parallel.runs_of_steps import STEPS, limits, steps
from tests.pipeline_parallel.test_sharing import ONE, TRAINER, close
from tests.pipeline_parallel.whole_runs import everything
from tests.ranks.pool import RankPool


def table_in(folder: Path) -> list[dict[str, float]]:
    """What the CSV logger has written."""
    with (folder / "csv" / "metrics.csv").open() as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def one(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """What one process shows, and its log."""
    folder = tmp_path_factory.mktemp("one")
    return rank_pool(1, everything, 1, str(folder), **ONE)[0], table_in(folder)


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_a_run_on_stages_shows_what_one_process_shows(
    ranks: RankPool, tmp_path: Path, one: tuple[dict[str, Any], Any], schedule: str
) -> None:
    expected, table = one
    assert 1 < expected["epochs"] < 8, "one process stops early"
    assert len(expected["files"]) == 2, "and has removed a checkpoint"
    assert expected["rates"][0] < 0.02, "and has lowered its learning rate"
    for found in ranks(2, everything, 2, str(tmp_path), 1, schedule, **TRAINER):
        close(found, expected)
    close(table_in(tmp_path), table)


def test_a_run_on_stages_with_data_ranks_shows_what_one_process_shows(
    ranks: RankPool, tmp_path: Path, one: tuple[dict[str, Any], Any]
) -> None:
    expected, table = one
    found = ranks(4, everything, 4, str(tmp_path), 2, **TRAINER)
    agreed = ["epochs", "steps", "stopped", "best", "kept", "files", "bar", "rates", "validate", "test"]
    for each in found:
        close({name: each[name] for name in agreed}, {name: expected[name] for name in agreed})
    close(found[2], found[0])
    close(found[3], found[1])
    close(without_steps(table_in(tmp_path)), without_steps(table))
    for loader, batches in enumerate(expected["predict"]):
        for number, batch in enumerate(batches):
            parts = [found[data_rank]["predict"][loader][number]["logits"] for data_rank in (0, 1)]
            close([*parts[0], *parts[1]], batch["logits"])


def without_steps(table: list[dict[str, float]]) -> list[dict[str, float]]:
    """A log without what a torchmetrics object shows on a step, which is the value of its own data rank."""
    return [{name: value for name, value in row.items() if name != "train_accuracy_step"} for row in table]


def test_gradients_become_steps_as_in_one_process(ranks: RankPool) -> None:
    (expected,) = ranks(1, steps, 1, **TRAINER)
    for world, *layout in ((2, 1, 1, "1f1b"), (4, 2, 2, "zb_v"), (2, 1, 0, "dualpipe")):
        found = ranks(world, steps, world, *layout, **TRAINER)
        for name in STEPS:
            runs = [each[name] for each in found]
            differences = worst(runs, expected[name])
            assert max(differences.values()) < 1e-5, (layout, name, differences)
            for run in runs:
                assert run["steps"] == expected[name]["steps"]
                assert run["rates"] == pytest.approx(expected[name]["rates"])
                assert bool(any(run["before"])) == bool(expected[name]["before"]), "gradients outlive their step"


def test_limits_of_a_run_mean_what_they_mean_in_one_process(ranks: RankPool) -> None:
    (expected,) = ranks(1, limits, 1, **ONE)
    for found in ranks(2, limits, 2, **TRAINER):
        close(found, expected)

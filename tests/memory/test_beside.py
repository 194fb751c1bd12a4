"""Runs beside each other in one picture."""

import re
import sys

import pytest

from lightning_5d.memory import MemoryRecord
from lightning_5d.memory.__main__ import main
from lightning_5d.memory.beside import RecordedRun, draw_beside
from lightning_5d.memory.record import Phase, Point

MIB = 2**20


def recorded(folder, rank, ranks, steps, most):
    """A rank that holds 2 MiB of weights, and in the forward of each step `most` MiB of activations."""
    record = MemoryRecord(rank, ranks)
    for step in steps:
        low, high = ({"weights": 2 * MIB, "activations": mib * MIB} for mib in (0, most))
        for name, held in (("forward", high), ("backward", low)):
            record.phases.append(Phase(name, step, step, 0.0, 1.0, held, held, held, held))
            record.points += [Point(step, step, len(record.phases) - 1, float(step), held) for _ in range(2)]
    record.save(folder)


@pytest.fixture
def folders(tmp_path):
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    recorded(alone, 0, 1, [1, 2, 3], 40)
    recorded(shared, 0, 2, [1, 2, 3], 20)
    recorded(shared, 1, 2, [1, 2], 21)
    return alone, shared


def test_the_last_step_that_all_ranks_recorded_is_shown_of_the_rank_that_holds_most(folders):
    alone, shared = (RecordedRun.load(folder) for folder in folders)
    assert (alone.name, alone.step, shared.name, shared.step) == ("one process", 3, "2 ranks", 2)
    assert shared.fullest.rank == 1
    assert [peak["activations"] // MIB for peak in shared.peaks] == [20, 21]
    assert {point.step for point in shared.fullest.points} == {2}
    assert [phase.name for phase in shared.fullest.phases] == ["forward", "backward"]


def test_the_picture_is_drawn_on_one_scale(folders, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: drawn.append(figure) or save(figure, *a, **k))
    path = draw_beside(folders, folders[1] / "beside.png", "Two runs")
    assert path.read_bytes().startswith(b"\x89PNG")
    axes = [each for each in drawn[0].axes if each.get_xlabel()]
    assert [each.get_xlabel() for each in axes] == ["at most 42.0 MiB", "at most 23.0 MiB, 55% of one process"]
    assert axes[0].get_ylim() == axes[1].get_ylim() == (0, 42 * 1.1)


def test_a_folder_without_a_recording_is_refused_by_name(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["memory", str(folders[0]), "--beside", str(tmp_path)])
    with pytest.raises(SystemExit, match=re.escape(f"{tmp_path} has no step that all ranks recorded")):
        main()

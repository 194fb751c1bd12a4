import re
import sys
from pathlib import Path

import pytest
from matplotlib import image

from lightning_5d.cli import main
from lightning_5d.pipeline_parallel import make_schedule, read_schedule
from tests.cli.conftest import FROM_A_SHELL


@pytest.fixture
def schedule(monkeypatch, capsys, tmp_path):
    """Run `fived schedule` in this process; gives status, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fived", "schedule", *map(str, arguments)])
        try:
            status = main()
        except SystemExit as stop:
            status = stop.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


SIZES = ("--ranks", 4, "--microbatches", 8)


def rows(output):
    return {line.split()[0]: line.split()[1:] for line in output.splitlines() if line.count("%") == 2}


def test_it_draws_in_the_terminal_from_a_shell(fived):
    status, output = fived("schedule", "1f1b", "--ranks", "2", "--microbatches", "3", launcher=FROM_A_SHELL)
    assert status == 0
    assert "rank 1 ...F0 B0--- F1 B1--- F2 B2--- ...... bubble 3, peak 1" in output


def test_several_names_are_compared_in_a_table(schedule):
    status, output, _ = schedule("1f1b", "zb-h1", "zb_h2", "interleaved_1f1b", *SIZES, "--chunks", 4)
    assert status == 0
    assert rows(output) == {
        "1f1b": ["4", "33", "9", "27.3%", "27.3%", "4"],
        "zb_h1": ["4", "27", "3", "11.1%", "11.1%", "4"],
        "zb_h2": ["4", "24", "0", "0.0%", "11.1%", "7"],
        "interleaved_1f1b": ["16", "26.25", "2.25", "8.6%", "8.6%", "4.75"],
    }


def test_durations_can_be_given_for_all_stages_or_each(schedule):
    options = ("--forward", "1,2,1,1", "--backward", 1.5, "--weight", 0.5, "--communication", 0.25)
    status, output, _ = schedule("afab", "--ranks", 4, "--microbatches", 1, *options)
    assert status == 0
    assert rows(output)["afab"][1] == "14.5"  # 5 + 4 · 2 + 6 · 0.25
    status, output, _ = schedule("dualpipe", *SIZES, "--overlapped", 2.5)
    assert rows(output)["dualpipe"][2] == "1.5"


def test_pictures_are_written(schedule, tmp_path):
    status, output, _ = schedule("zb_v", *SIZES, "--png", "v.png", "--svg", "v.svg")
    assert status == 0
    assert "rank 0" not in output
    assert "v.png" in output
    height, width, _ = image.imread(tmp_path / "v.png").shape
    assert width > 2 * height > 1000
    assert "<svg" in (tmp_path / "v.svg").read_text()[:2000]


def test_a_table_goes_out_and_in(schedule, tmp_path):
    assert schedule("zb_h1", *SIZES, "--csv", "mine.csv")[0] == 0
    assert read_schedule(tmp_path / "mine.csv") == make_schedule("zb_h1", 4, 8)
    status, output, _ = schedule("mine.csv")
    assert status == 0
    assert rows(output)["zb_h1"] == ["4", "27", "3", "11.1%", "11.1%", "4"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("1fb1", *SIZES), "There is no schedule '1fb1'; the nearest is 1f1b"),
        (("1f1b", "--ranks", 4), "1f1b: give --ranks and --microbatches."),
        (("1f1b", *SIZES, "--chunks", 2), "1f1b has 1 stage per rank, not chunks=2"),
        (("1f1b", "zb_v", *SIZES, "--group-size", 4), "1f1b has no group_size (here 4)"),
        (("1f1b", "afab", *SIZES, "--csv", "x.csv"), "--csv writes one schedule, but there are 2"),
        (("1f1b", *SIZES, "--forward", -1), "forward is -1.0"),
        (("1f1b", *SIZES, "--forward", "1,2"), "forward has 2 times, but 1f1b: 4 ranks, 4 stages"),
        (("dualpipe", "--ranks", 3, "--microbatches", 6), "there are 3 ranks; use 2 or 4, or dualpipe_v"),
        (("nowhere.csv",), "Cannot read the schedule 'nowhere.csv': No such file"),
        (("1f1b", *SIZES, "--png", "no/such/folder.png"), "No such file or directory: 'no/such/folder.png'"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(schedule, arguments, said):
    status, output, errors = schedule(*arguments)
    assert status == 1
    assert said in errors
    assert output == ""


def test_a_table_that_deadlocks_says_who_waits_for_what(schedule, tmp_path):
    (tmp_path / "mine.csv").write_text("0F0,0BW0,0F1,0BW1\n1F0,1F1,1BW0,1BW1\n")
    status, _, errors = schedule("mine.csv")
    assert status == 1
    assert (
        "Rank 1 waits at F of stage 1, microbatch 1 for F of stage 0, microbatch 1, which rank 0 has not come to"
        in errors
    )


def test_times_that_are_no_numbers_are_refused(schedule):
    status, _, errors = schedule("1f1b", *SIZES, "--weight", "long")
    assert status == 2
    assert "'long' is no time; give a number, or one per stage as 1,1,2" in errors


def test_every_command_of_the_documentation_runs(schedule):
    page = (Path(__file__).parents[2] / "docs" / "pipeline_schedules.md").read_text()
    commands = re.findall(r"^fived schedule ([^#\n]+)", page, re.MULTILINE)
    assert len(commands) == 7
    for command in commands:
        status, output, errors = schedule(*re.sub(r"--png \S+", "", command).split())
        assert (status, errors) == (0, ""), command
        assert len(rows(output)) == len(command.split("--")[0].split())


def test_help_lists_the_schedules(schedule):
    status, output, _ = schedule("--help")
    assert status == 0
    assert "zb_v              No bubble with the activations of 1F1B." in output

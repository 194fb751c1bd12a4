import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_5d.pipeline_parallel import (
    SCHEDULES,
    Action,
    Kind,
    Overlap,
    format_schedule,
    make_schedule,
    parse_schedule,
    read_schedule,
    write_schedule,
)

F, B, W, BW = Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.BACKWARD


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 8), st.integers(1, 20))
def test_a_table_read_back_is_the_schedule_that_was_written(name, half, microbatches):
    schedule = make_schedule(name, 2 * half, microbatches)
    assert parse_schedule(format_schedule(schedule)) == schedule


def test_a_file_goes_out_and_in(tmp_path):
    schedule = make_schedule("interleaved_1f1b", 4, 6, chunks=3)
    write_schedule(schedule, tmp_path / "mine.csv")
    assert read_schedule(tmp_path / "mine.csv") == schedule
    assert make_schedule(str(tmp_path / "mine.csv"), 4, 6, chunks=3) == schedule


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_headers_placement_and_copies_are_read_off_the_forwards(name):
    schedule = make_schedule(name, 4, 8)
    bare = "\n".join(line for line in format_schedule(schedule).splitlines() if not line.startswith("#"))
    read = parse_schedule(bare, name)
    assert read == schedule


def test_a_table_by_hand():
    schedule = parse_schedule(
        "# my first table\n"
        "# Name: mine\n"
        "\n"
        '0F0, 0f1,, "0B0" ,0W0,0BW1\n'
        "1F0,1BW0,,1F1,1BW1,,,\n"
    )  # fmt: skip
    assert schedule.name == "mine"
    assert schedule.placement == ((0, 1),)
    assert schedule.copies == (0, 0)
    assert schedule.rows[0] == (Action(F, 0, 0), Action(F, 0, 1), Action(B, 0, 0), Action(W, 0, 0), Action(BW, 0, 1))
    assert len(schedule.rows[1]) == 4
    assert parse_schedule("0F0,0F1+0BW0,0BW1").rows[0][1] == Overlap(Action(F, 0, 1), Action(BW, 0, 0))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0X0", "Line 1, cell 2 is '0X0'; a cell is stage, kind (F, B, W or BW) and microbatch, such as 0F2"),
        ("# a\n0F0,F0", "Line 2, cell 2 is 'F0'"),
        ("0F0,0F1+0BW0+0W0", "Line 1, cell 2 is '0F1+0BW0+0W0': 3 actions; two can overlap"),
        ("# placement: 0 x\n0F0", "placement are '0 x'; they are numbers from 0 on with blanks between"),
        ("# placement: 0 3\n# copies: 0\n0F0,0BW0", "ranks (0, 3), but ranks go from 0 to 0"),
        ("", "has no action"),
        ("0F0,0BW0\n1BW0", "2 stages and 1 microbatches, but F of stage 1, microbatch 0 is missing"),
        ("0F0,0BW0\n0F0", "F of stage 0, microbatch 0 is on rank 0 and on rank 1; once is right"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_place(text, said):
    with pytest.raises(ValueError) as caught:
        parse_schedule(text)
    assert said in str(caught.value)


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.csv': No such file"):
        read_schedule(tmp_path / "nowhere.csv")
    (tmp_path / "picture.csv").write_bytes(b"\x89PNG\xff")
    with pytest.raises(ValueError, match=r"picture\.csv' is not UTF-8 text"):
        read_schedule(tmp_path / "picture.csv")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["0F0,0F1,0BW0", "1F0,1BW0,1F1,1BW1"], "B of stage 0, microbatch 1 (rank 0), is missing"),
        (["0F0,0BW0,0F1,0BW1", "1F0,1F1,1BW0,1BW1"], "Rank 0 waits at BW of stage 0, microbatch 0 for B of stage 1"),
    ],
)
def test_a_table_that_cannot_run_is_refused_by_name(tmp_path, rows, said):
    (tmp_path / "mine.csv").write_text("\n".join(rows))
    with pytest.raises(ValueError) as caught:
        make_schedule(str(tmp_path / "mine.csv"), 2, 2)
    assert "Schedule 'mine' cannot run" in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "options", "said"),
    [
        (4, 2, {}, "is a table for ranks=2, not 4; use 2"),
        (2, 8, {}, "is a table for microbatches=2, not 8; use 2"),
        (2, 2, {"chunks": 2}, "is a table for chunks=1, not 2; use 1"),
        (2, 2, {"group_size": 2}, "is a table, which has no group_size (here 2); leave it out"),
    ],
)
def test_a_table_for_other_sizes_is_refused(tmp_path, ranks, microbatches, options, said):
    write_schedule(make_schedule("1f1b", 2, 2), tmp_path / "mine.csv")
    with pytest.raises(ValueError) as caught:
        make_schedule(str(tmp_path / "mine.csv"), ranks, microbatches, **options)
    assert said in str(caught.value)

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_5d.pipeline_parallel import Schedule, check, make_schedule, parse_schedule, simulate, validate

PLACED = "# placement: 0 1\n# copies: 0 0\n"
RIGHT = ["0F0,0F1,0BW0,0BW1", "1F0,1BW0,1F1,1BW1"]


def problems(*rows, header=PLACED, sends="buffered"):
    return validate(parse_schedule(header + "\n".join(rows)), sends)


def test_a_right_table_has_no_problem():
    assert problems(*RIGHT) == []


def test_what_is_missing_is_named_with_its_rank():
    assert problems("0F0,0F1,0BW0", RIGHT[1]) == [
        "B of stage 0, microbatch 1 (rank 0), is missing, neither alone nor in a BW.",
        "W of stage 0, microbatch 1 (rank 0), is missing, neither alone nor in a BW.",
    ]
    assert problems("0F0,0F1,0BW0,0B1", RIGHT[1]) == [
        "W of stage 0, microbatch 1 (rank 0), is missing, neither alone nor in a BW."
    ]
    assert problems("0F0,0BW0,0BW1", RIGHT[1]) == ["F of stage 0, microbatch 1 (rank 0), is missing."]


def test_what_is_computed_twice_is_named():
    assert problems(RIGHT[0] + ",0W1", RIGHT[1]) == [
        "W of stage 0, microbatch 1 (rank 0), is computed 2 times; once is right."
    ]


def test_what_is_on_a_wrong_rank_is_named():
    said = problems("0F0,0F1,0BW0,1BW1", "1F0,1BW0,1F1,0BW1")
    assert said == [
        "Rank 0 has BW of stage 1, microbatch 1, but that stage is placed on rank 1 for this microbatch.",
        "Rank 1 has BW of stage 0, microbatch 1, but that stage is placed on rank 0 for this microbatch.",
    ]


def test_stages_and_microbatches_that_do_not_exist_are_named():
    assert problems(RIGHT[0] + ",2F0", RIGHT[1] + ",1W7") == [
        "Rank 0 has F of stage 2, microbatch 0, but stages go from 0 to 1 and microbatches from 0 to 1.",
        "Rank 1 has W of stage 1, microbatch 7, but stages go from 0 to 1 and microbatches from 0 to 1.",
    ]


def test_a_pair_is_a_forward_and_a_backward():
    assert "a pair is one F and one B or BW" in problems("0F0+0F1,0BW0,0BW1", RIGHT[1])[0]


def test_many_problems_of_a_sort_are_counted():
    schedule = make_schedule("1f1b", 2, 20)
    said = validate(Schedule("mine", schedule.placement, schedule.copies, (schedule.rows[0], ())))
    assert len(said) == 6
    assert said[-1] == "… and 55 more like the last."


def test_a_circle_of_ranks_is_spelled_out():
    assert problems("0F0,0BW0,0F1,0BW1", "1F0,1F1,1BW0,1BW1") == [
        "2 ranks wait for each other in a circle: "
        "Rank 0 waits at BW of stage 0, microbatch 0 for B of stage 1, microbatch 0, which rank 1 has not come to. "
        "Rank 1 waits at F of stage 1, microbatch 1 for F of stage 0, microbatch 1, which rank 0 has not come to."
    ]


def test_a_rank_that_waits_for_itself_is_told_so():
    assert problems("0F0,0F1,0W0,0B0,0BW1", RIGHT[1]) == [
        "One rank waits for itself: Rank 0 waits at W of stage 0, microbatch 0 for B of stage 0, microbatch 0, "
        "which comes later in its own row."
    ]
    assert problems("0F0,0F1,0BW0,0BW1", "1F0,1F1+1BW1,1BW0") == [
        "One rank waits for itself: Rank 1 waits at BW of stage 1, microbatch 1 for F of stage 1, microbatch 1, "
        "which comes later in its own row."
    ]


def test_only_ranks_of_the_circle_are_named():
    schedule = parse_schedule(
        "# placement: 0 1 2\n# copies: 0 0\n0F0,0F1,0BW0,0BW1\n1F0,1BW0,1F1,1BW1\n2F0,2F1,2BW0,2BW1"
    )
    said = validate(schedule)[0]
    assert said.startswith("2 ranks wait for each other in a circle: Rank 1 waits at BW of stage 1, microbatch 0 for")
    assert "Rank 0 waits" not in said


def test_blocking_sends_would_deadlock_1f1b_but_not_afab():
    for microbatches in (4, 9):
        assert validate(make_schedule("afab", 4, microbatches), "rendezvous") == []
        assert validate(make_schedule("1f1b", 4, microbatches)) == []
        said = validate(make_schedule("1f1b", 4, microbatches), "rendezvous")
        assert len(said) == 1
        assert (
            "Rank 2 has computed F of stage 2, microbatch 1 and waits until rank 3 comes to F of stage 3, microbatch 1"
            in said[0]
        )
        assert "Rank 3 has computed BW of stage 3, microbatch 0 and waits until rank 2 comes to B of stage 2" in said[0]


def test_one_rank_needs_no_messages():
    assert validate(make_schedule("zb_v", 1, 4), "rendezvous") == []


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_a_disordered_schedule_is_found_to_deadlock_where_the_clock_stops(data):
    schedule = make_schedule(data.draw(st.sampled_from(["1f1b", "zb_h1", "zb_v", "dualpipe"])), 4, 4)
    rank = data.draw(st.integers(0, 3))
    row = list(schedule.rows[rank])
    first = data.draw(st.integers(0, len(row) - 1))
    row.insert(data.draw(st.integers(max(0, first - 4), min(len(row) - 1, first + 4))), row.pop(first))
    rows = (*schedule.rows[:rank], tuple(row), *schedule.rows[rank + 1 :])
    moved = Schedule("moved", schedule.placement, schedule.copies, rows)
    said = validate(moved)
    if said:
        with pytest.raises(ValueError) as caught:
            simulate(moved)
        assert said[0] in str(caught.value)
    else:
        assert [len(spans) for spans in simulate(moved).timeline] == [len(row) for row in rows]


def test_check_raises_with_all_problems_and_simulate_with_the_circle():
    broken = parse_schedule(PLACED + "0F0,0BW0,0F1\n" + RIGHT[1])
    with pytest.raises(ValueError, match=r"(?s)'table' cannot run:.*B of stage 0.*W of stage 0"):
        check(broken)
    stuck = parse_schedule(PLACED + "0F0,0BW0,0F1,0BW1\n1F0,1F1,1BW0,1BW1")
    with pytest.raises(ValueError, match="Rank 1 waits at F of stage 1, microbatch 1"):
        simulate(stuck)

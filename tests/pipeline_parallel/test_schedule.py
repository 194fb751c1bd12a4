import pytest

from lightning_5d.pipeline_parallel import SCHEDULES, Action, Kind, Overlap, Schedule, make_schedule

F = Action(Kind.FORWARD, 0, 0)
BW = Action(Kind.BACKWARD, 0, 0)


def test_equal_schedules_are_one_key():
    schedules = {make_schedule("1f1b", 4, 8), make_schedule("1f1b", 4, 8), make_schedule("1f1b", 4, 9)}
    assert len(schedules) == 2
    with pytest.raises(AttributeError):
        next(iter(schedules)).name = "other"


def test_a_schedule_prints_its_rows():
    assert str(make_schedule("1f1b", 2, 2)) == (
        "1f1b: 2 ranks, 2 stages, 2 microbatches\nrank 0: 0F0 0F1 0BW0 0BW1\nrank 1: 1F0 1BW0 1F1 1BW1"
    )
    assert "0F3+3BW5" in str(make_schedule("dualpipe", 4, 8))
    assert repr(make_schedule("zb_v", 4, 8)) == "<Schedule zb_v: 4 ranks, 8 stages, 8 microbatches>"


@pytest.mark.parametrize(
    ("placement", "copies", "rows", "said"),
    [
        (((0, 2),), (0,), ((F,), (BW,)), "ranks (0, 2), but ranks go from 0 to 1"),
        (((0, 1), (1,)), (0,), ((F,), (BW,)), "copy 1 has 1 stages and copy 0 has 2"),
        (((0, 1),), (0, 1), ((F,), (BW,)), "copies [0, 1], but copies go from 0 to 0"),
        (((0,),), (), ((F,),), "1 ranks and 0 microbatches"),
    ],
)
def test_parts_that_do_not_fit_are_refused(placement, copies, rows, said):
    with pytest.raises(ValueError) as caught:
        Schedule("mine", placement, copies, rows)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", SCHEDULES)
def test_placement_is_looped_or_a_v_or_both_ways(name):
    schedule = make_schedule(name, 4, 8)
    looped = (0, 1, 2, 3)
    expected = {
        "interleaved_1f1b": (looped * 2,),
        "looped_bfs": (looped * 2,),
        "zb_v": ((0, 1, 2, 3, 3, 2, 1, 0),),
        "v_half": ((0, 1, 2, 3, 3, 2, 1, 0),),
        "v_min": ((0, 1, 2, 3, 3, 2, 1, 0),),
        "dualpipe_v": ((0, 1, 2, 3, 3, 2, 1, 0),),
        "dualpipe": (looped, looped[::-1]),
    }
    assert schedule.placement == expected.get(name, (looped,))
    assert schedule.name == name


def test_backward_is_split_where_the_schedule_needs_it():
    split = {name for name in SCHEDULES if make_schedule(name, 4, 8).splits_backward}
    assert split == {"zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe", "dualpipe_v"}


def test_actions_speak_of_stages_and_microbatches():
    assert str(Overlap(F, Action(Kind.BACKWARD, 3, 2))) == (
        "F of stage 0, microbatch 0 with BW of stage 3, microbatch 2"
    )


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "options", "said"),
    [
        ("1fb1", 4, 8, {}, "no schedule '1fb1'; the nearest is 1f1b; there are afab, 1f1b,"),
        ("zb_h3", 4, 8, {}, "the nearest is zb_h"),
        ("qqqqqq", 4, 8, {}, "no schedule 'qqqqqq'; there are afab"),
        ("1f1b", 0, 8, {}, "ranks is 0; a pipeline has 1 or more"),
        ("zb_v", 4, 0, {}, "microbatches is 0; a pipeline has 1 or more"),
        ("1f1b", 4, 8, {"chunks": 2}, "1f1b has 1 stage per rank, not chunks=2; leave chunks out, or use interleaved_1f1b"),
        ("zb_v", 4, 8, {"chunks": 3}, "zb_v has 2 stages per rank, not chunks=3"),
        ("afab", 4, 8, {"group_size": 4}, "afab has no group_size (here 4); leave it out, or use interleaved_1f1b."),
        ("looped_bfs", 4, 8, {"group_size": 4}, "looped_bfs has no group_size"),
        ("interleaved_1f1b", 4, 8, {"chunks": 1}, "1 chunks per rank; it takes 2 or more, and with 1 it would be 1f1b"),
        ("looped_bfs", 4, 8, {"chunks": 0}, "0 chunks per rank; it takes 2 or more, and with 1 it would be afab"),
        ("interleaved_1f1b", 4, 8, {"group_size": 3}, "group_size is 3, but with 4 ranks and 8 microbatches it goes from 4"),
        ("interleaved_1f1b", 4, 8, {"group_size": 9}, "to 8 (breadth-first); the nearest is 8"),
        ("interleaved_1f1b", 4, 3, {"group_size": 4}, "from 3 (depth-first) to 3 (breadth-first); the nearest is 3"),
        ("dualpipe", 5, 8, {}, "there are 5 ranks; use 4 or 6, or dualpipe_v"),
        ("dualpipe", 1, 8, {}, "there are 1 ranks; use 2, or dualpipe_v"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_does(name, ranks, microbatches, options, said):
    with pytest.raises(ValueError) as caught:
        make_schedule(name, ranks, microbatches, **options)
    assert said in str(caught.value)


def test_names_may_be_written_in_other_ways():
    for name, same in (
        ("ZB-H1", "zb_h1"),
        ("gpipe", "afab"),
        ("DualPipeV", "dualpipe_v"),
        ("Interleaved", "interleaved_1f1b"),
    ):
        assert make_schedule(name, 4, 8) == make_schedule(same, 4, 8)


def test_a_number_of_chunks_that_the_schedule_has_anyway_may_be_said():
    assert make_schedule("zb_v", 4, 8, chunks=2) == make_schedule("zb_v", 4, 8)
    assert make_schedule("1f1b", 4, 8, chunks=1) == make_schedule("1f1b", 4, 8)

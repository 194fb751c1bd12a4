"""What the papers say about the schedules, for p ranks, m microbatches and v stages per rank."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_5d.pipeline_parallel import (
    SCHEDULES,
    Durations,
    Kind,
    make_schedule,
    peak_activations,
    simulate,
    validate,
)
from lightning_5d.pipeline_parallel.schedule import flatten

RANKS = st.integers(1, 16)
MICROBATCHES = st.integers(1, 64)
CHUNKS = st.integers(2, 8)
TIME = st.integers(1, 8).map(float)
LOOPED = [name for name, family in SCHEDULES.items() if family.chunks is None]
FIXED = [name for name in SCHEDULES if name not in LOOPED]


def claim(examples=40):
    """Many examples, the same in every run."""
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None)


def from_ranks(data, name, factor, offset=0):
    """A number of ranks, and one of microbatches from factor · ranks + offset on."""
    ranks = data.draw(st.integers(1, 8).map(lambda half: 2 * half)) if name == "dualpipe" else data.draw(RANKS)
    smallest = max(1, factor * ranks + offset)
    return ranks, data.draw(st.integers(smallest, max(64, smallest)))


def bubbles(name, ranks, microbatches, *times, **options):
    """The smallest and the largest bubble of a rank."""
    bubble = simulate(make_schedule(name, ranks, microbatches, **options), Durations(*times)).bubble
    return min(bubble), max(bubble)


def both(value):
    return pytest.approx((value, value), abs=1e-9)


@pytest.mark.parametrize("name", FIXED)
@claim(60)
@given(st.data(), MICROBATCHES)
def test_every_schedule_is_complete_and_cannot_deadlock_for_any_microbatch_count(name, data, microbatches):
    ranks, _ = from_ranks(data, name, 0)
    assert validate(make_schedule(name, ranks, microbatches)) == []


@pytest.mark.parametrize("name", LOOPED)
@claim(30)
@given(st.data(), RANKS, MICROBATCHES, CHUNKS)
def test_every_looped_schedule_is_complete_and_cannot_deadlock(name, data, ranks, microbatches, chunks):
    smallest = min(ranks, microbatches)
    sizes = st.none() | st.integers(smallest, microbatches) if name == "interleaved_1f1b" else st.none()
    schedule = make_schedule(name, ranks, microbatches, chunks=chunks, group_size=data.draw(sizes))
    assert validate(schedule) == []
    assert schedule.stages == ranks * chunks


@pytest.mark.parametrize("name", [*FIXED, *LOOPED])
def test_one_microbatch_and_one_rank_run(name):
    ranks = 2 if name == "dualpipe" else 1
    for microbatches in (1, 2, 5):
        assert validate(make_schedule(name, ranks, microbatches)) == []
    alone = simulate(make_schedule(name, ranks, 1))
    assert sum(alone.busy) == pytest.approx(3 * ranks)


@pytest.mark.parametrize("name", ["afab", "1f1b"])
@claim()
@given(RANKS, MICROBATCHES, TIME, TIME, TIME)
def test_afab_and_1f1b_wait_for_p_minus_1_microbatches(name, ranks, microbatches, f, b, w):
    simulation = simulate(make_schedule(name, ranks, microbatches), Durations(f, b, w))
    assert min(simulation.bubble) == max(simulation.bubble) == (ranks - 1) * (f + b + w)
    assert simulation.bubble_ratio == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    assert simulation.bubble_ratio_with_barrier == pytest.approx(simulation.bubble_ratio)


@claim()
@given(RANKS, MICROBATCHES)
def test_afab_keeps_all_microbatches_and_1f1b_at_most_p(ranks, microbatches):
    assert peak_activations(make_schedule("afab", ranks, microbatches)) == (microbatches,) * ranks
    kept = tuple(min(microbatches, ranks - rank) for rank in range(ranks))
    assert peak_activations(make_schedule("1f1b", ranks, microbatches)) == kept


@pytest.mark.parametrize("name", LOOPED)
@claim()
@given(st.data(), CHUNKS, TIME, TIME, TIME)
def test_v_stages_per_rank_divide_the_bubble_by_v(name, data, chunks, f, b, w):
    ranks, microbatches = from_ranks(data, name, 1)
    bubble = bubbles(name, ranks, microbatches, f, b, w, chunks=chunks)
    assert bubble == both((ranks - 1) * (f + b + w) / chunks)


@pytest.mark.parametrize("name", LOOPED)
def test_fewer_microbatches_than_ranks_run_with_a_larger_bubble(name):
    assert bubbles(name, 4, 4) == both(4.5)
    assert bubbles(name, 4, 3) == both(6)


@claim()
@given(st.integers(2, 16), st.integers(2, 6), CHUNKS)
def test_interleaved_keeps_p_times_1_plus_p_minus_1_over_pv(ranks, rounds, chunks):
    peak = peak_activations(make_schedule("interleaved_1f1b", ranks, rounds * ranks, chunks=chunks))
    assert max(peak) == peak[0] == pytest.approx(ranks * (1 + (ranks - 1) / (ranks * chunks)))


@claim()
@given(st.data(), CHUNKS)
def test_the_group_size_trades_memory_without_touching_the_bubble(data, chunks):
    ranks = data.draw(RANKS)
    size = data.draw(st.integers(ranks, 32))
    microbatches = size * data.draw(st.integers(1, 3))
    schedule = make_schedule("interleaved_1f1b", ranks, microbatches, chunks=chunks, group_size=size)
    simulation = simulate(schedule, Durations(1, 2, 1))
    assert max(simulation.bubble) == pytest.approx((ranks - 1) * 4 / chunks, abs=1e-9)
    kept = min(microbatches, ((chunks - 1) * size + 2 * ranks - 1) / chunks)
    assert max(simulation.peak_activations) == pytest.approx(kept)


def test_the_group_size_goes_from_depth_first_to_breadth_first():
    def warmup(size):
        row = make_schedule("interleaved_1f1b", 2, 6, chunks=2, group_size=size).rows[0]
        return [(action.stage, action.microbatch) for action in row if action.kind is Kind.FORWARD]

    deep = [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3), (0, 4), (0, 5), (2, 4), (2, 5)]
    assert warmup(None) == warmup(2) == deep
    assert warmup(3) == [(s, m) for group in (range(3), range(3, 6)) for s in (0, 2) for m in group]
    assert warmup(6) == [(s, m) for s in (0, 2) for m in range(6)]


@claim(20)
@given(RANKS, MICROBATCHES, CHUNKS)
def test_looped_bfs_does_each_stage_in_one_piece_and_keeps_all(ranks, microbatches, chunks):
    schedule = make_schedule("looped_bfs", ranks, microbatches, chunks=chunks)
    assert peak_activations(schedule) == pytest.approx((microbatches,) * ranks)
    for rank, row in enumerate(schedule.rows):
        stages = list(schedule.stages_of(rank))
        pieces = [(Kind.FORWARD, stage) for stage in stages] + [(Kind.BACKWARD, stage) for stage in stages[::-1]]
        assert [(a.kind, a.stage) for a in row] == [piece for piece in pieces for _ in range(microbatches)]


@claim()
@given(st.data(), TIME, TIME, TIME)
def test_zb_h1_bubble_is_p_minus_1_times_f_plus_b_minus_w(data, f, b, w):
    w = min(f, b, w)
    ranks, microbatches = from_ranks(data, "zb_h1", 1)
    assert bubbles("zb_h1", ranks, microbatches, f, b, w) == both((ranks - 1) * (f + b - w))


def test_zb_h1_bubble_is_a_third_of_1f1b_from_p_microbatches_on():
    for ranks in (2, 5, 16):
        assert bubbles("zb_h1", ranks, ranks)[1] == bubbles("1f1b", ranks, ranks)[1] / 3
        if ranks > 2:
            assert bubbles("zb_h1", ranks, ranks - 1)[1] > ranks - 1


@claim()
@given(st.data(), TIME, TIME, TIME)
def test_zb_h2_bubble_is_p_minus_1_times_f_plus_b_minus_2w(data, f, b, w):
    w = min(f, b, w)
    ranks, microbatches = from_ranks(data, "zb_h2", 2, -1)
    assert bubbles("zb_h2", ranks, microbatches, f, b, w) == both((ranks - 1) * (f + b - 2 * w))


@pytest.mark.parametrize(("name", "staircase"), [("zb_h2", 1.0), ("zb_v", 0.5)])
@claim(20)
@given(st.data())
def test_zb_h2_and_zb_v_have_no_bubble_unless_a_barrier_brings_it_back(name, staircase, data):
    ranks, microbatches = from_ranks(data, name, 2, -1)
    simulation = simulate(make_schedule(name, ranks, microbatches))
    assert simulation.bubble == (0,) * ranks
    assert simulation.makespan == 3 * microbatches + staircase * (ranks - 1)


@pytest.mark.parametrize("name", ["zb_h2", "zb_v"])
def test_below_2p_minus_1_microbatches_there_is_a_bubble(name):
    for ranks in (2, 4, 9):
        assert bubbles(name, ranks, 2 * ranks - 1) == (0, 0)
        assert bubbles(name, ranks, 2 * ranks - 2)[1] > 0


@claim()
@given(RANKS, MICROBATCHES)
def test_zb_h1_and_zb_v_keep_p_and_zb_h2_2p_minus_1(ranks, microbatches):
    assert max(peak_activations(make_schedule("zb_h1", ranks, microbatches))) == min(ranks, microbatches)
    assert max(peak_activations(make_schedule("zb_v", ranks, microbatches))) == min(ranks, microbatches)
    assert max(peak_activations(make_schedule("zb_h2", ranks, microbatches))) == min(2 * ranks - 1, microbatches)


@pytest.mark.parametrize("ranks", range(2, 17))
def test_v_half_keeps_half_of_1f1b_with_half_its_bubble(ranks):
    for microbatches in ((ranks + 1) // 2, ranks, 2 * ranks, 64):
        simulation = simulate(make_schedule("v_half", ranks, microbatches))
        assert max(simulation.peak_activations) <= ranks / 2 + 1
        assert max(simulation.bubble) <= ranks * 3 / 2


@pytest.mark.parametrize("ranks", range(2, 17))
def test_v_min_keeps_a_third_of_1f1b_with_two_thirds_of_its_bubble(ranks):
    for microbatches in (1, ranks, 2 * ranks, 64):
        simulation = simulate(make_schedule("v_min", ranks, microbatches))
        assert max(simulation.peak_activations) <= ranks / 3 + 4 / 3
        assert max(simulation.bubble) <= ranks * 2


@claim()
@given(RANKS, MICROBATCHES)
def test_v_half_and_v_min_stay_within_their_memory_for_any_microbatch_count(ranks, microbatches):
    assert max(peak_activations(make_schedule("v_half", ranks, microbatches))) <= (ranks + 2) // 2
    assert max(peak_activations(make_schedule("v_min", ranks, microbatches))) <= (ranks + 4) // 3


@pytest.mark.parametrize(("ranks", "half", "least"), [(4, 4.0, 5.5), (8, 10.0, 13.5), (16, 22.0, 29.5)])
def test_v_half_and_v_min_are_where_they_were(ranks, half, least):
    assert bubbles("v_half", ranks, 64) == both(half)
    assert bubbles("v_min", ranks, 64) == both(least)


@claim()
@given(st.data(), TIME, TIME, st.floats(0.5, 1))
def test_dualpipe_bubble_is_p_half_minus_1_times_fb_plus_b_minus_3w(data, f, w, saved):
    """The source's B is the whole backward; the law wants F as long as the input gradient, and W no longer."""
    ranks, half = data.draw(st.integers(1, 8)) * 2, data.draw(st.integers(0, 24))
    w = min(f, w)
    pair = max(2 * f, (2 * f + w) * saved)
    bubble = simulate(
        make_schedule("dualpipe", ranks, 2 * ranks + 2 * half), Durations(f, f, w, overlapped=pair)
    ).bubble
    assert max(bubble) == pytest.approx((ranks / 2 - 1) * (pair + (f + w) - 3 * w), abs=1e-9)


@claim()
@given(st.data(), TIME, TIME, st.floats(0.5, 1))
def test_dualpipe_v_has_the_bubble_of_dualpipe_with_as_many_stages(data, f, w, saved):
    ranks = data.draw(st.integers(1, 16))
    microbatches = data.draw(st.integers(2 * ranks, 64))
    w = min(f, w)
    pair = max(2 * f, (2 * f + w) * saved)
    bubble = simulate(make_schedule("dualpipe_v", ranks, microbatches), Durations(f, f, w, overlapped=pair)).bubble
    stages = 2 * ranks  # of half a rank's share each
    assert max(bubble) == pytest.approx((stages / 2 - 1) * (pair + (f + w) - 3 * w) / 2, abs=1e-9)


@pytest.mark.parametrize("ranks", [2, 4, 10, 16])
def test_dualpipe_keeps_p_plus_1_and_dualpipe_v_p_plus_a_half(ranks):
    for microbatches in (2 * ranks, 2 * ranks + 2, 64):
        assert max(peak_activations(make_schedule("dualpipe", ranks, microbatches))) == ranks + 1
        # Stages + 1 activations, as in DualPipe, but each is of half a rank's share.
        assert max(peak_activations(make_schedule("dualpipe_v", ranks, microbatches))) == (2 * ranks + 1) / 2


def test_dualpipe_below_2p_or_with_an_odd_number_runs_with_a_larger_bubble():
    assert bubbles("dualpipe", 8, 16)[1] == 6
    for microbatches in (1, 7, 15, 17):
        schedule = make_schedule("dualpipe", 8, microbatches)
        assert validate(schedule) == []
        assert schedule.copies.count(0) - schedule.copies.count(1) == microbatches % 2
        assert max(simulate(schedule).bubble) > 6


def test_dualpipe_runs_both_directions_through_the_same_ranks():
    schedule = make_schedule("dualpipe", 4, 8)
    assert schedule.placement == ((0, 1, 2, 3), (3, 2, 1, 0))
    assert schedule.copies == (0, 0, 0, 0, 1, 1, 1, 1)
    assert schedule.stages_of(1) == (1, 2)
    assert schedule.rank_of(0, 0) == 0
    assert schedule.rank_of(0, 7) == 3
    first = next(flatten(schedule.rows[3]))
    assert (first.kind, first.stage, first.microbatch) == (Kind.FORWARD, 0, 4)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_less_bubble_in_the_order_the_papers_give(ranks):
    order = ["afab", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2"]
    largest = [bubbles(name, ranks, 4 * ranks)[1] for name in order]
    assert largest == [3 * (ranks - 1), 3 * (ranks - 1), 1.5 * (ranks - 1), ranks - 1, 0]

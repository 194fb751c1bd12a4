import time

import pytest

from lightning_5d.pipeline_parallel import Durations, make_schedule, parse_schedule, simulate, validate

TWO = "0F0,0F1,0BW0,0BW1\n1F0,1BW0,1F1,1BW1"


def times(simulation):
    return [[(span.start, span.end) for span in spans] for spans in simulation.timeline]


def test_a_timeline_computed_by_hand():
    simulation = simulate(parse_schedule(TWO), Durations(forward=1, backward=1.5, weight=0.5, communication=0.25))
    assert times(simulation) == [
        [(0, 1), (1, 2), (4.5, 6.5), (7.5, 9.5)],
        [(1.25, 2.25), (2.25, 4.25), (4.25, 5.25), (5.25, 7.25)],
    ]
    assert simulation.makespan == simulation.period == 9.5
    assert simulation.busy == (6, 6)
    assert simulation.bubble == (3.5, 3.5)
    assert simulation.bubble_ratio == pytest.approx(7 / 19)


def test_stages_may_differ():
    simulation = simulate(parse_schedule(TWO), Durations(forward=(1, 3), backward=(2, 4), weight=(0, 1)))
    assert times(simulation)[1] == [(1, 4), (4, 9), (9, 12), (12, 17)]
    assert times(simulation)[0][-1] == (17, 19)
    assert simulation.busy == (6, 16)
    assert simulation.bubble == (13, 3)


def test_one_number_is_the_time_of_a_ranks_share_however_many_stages_it_holds():
    for name, options in (("1f1b", {}), ("interleaved_1f1b", {"chunks": 4}), ("zb_v", {}), ("dualpipe", {})):
        simulation = simulate(make_schedule(name, 4, 8, **options), Durations(1, 2, 3))
        assert simulation.busy == pytest.approx((48, 48, 48, 48))


def test_communication_takes_time_between_ranks_only():
    assert simulate(make_schedule("afab", 4, 1), Durations(communication=0.5)).makespan == 12 + 6 * 0.5
    # In a V the two stages of the last rank follow each other without a message, and so do loss and backward.
    first = simulate(make_schedule("zb_v", 2, 1), Durations(communication=0.5)).timeline[0]
    assert [span.end for span in first if span.entry.cell == "0B0"] == [8 * 0.5 + 4 * 0.5]


def test_an_overlapped_pair_starts_when_both_inputs_are_there_and_takes_its_own_time():
    schedule = make_schedule("dualpipe", 4, 8)
    plain, woven = (simulate(schedule, Durations(overlapped=time)) for time in (None, 2.5))
    pair = next(span for span in plain.timeline[0] if "+" in span.entry.cell)
    assert pair.end - pair.start == 3
    pair = next(span for span in woven.timeline[0] if "+" in span.entry.cell)
    assert pair.end - pair.start == 2.5
    assert (max(plain.bubble), max(woven.bubble)) == (2, 1.5)


def test_live_activations_go_from_forward_to_weight_gradient():
    simulation = simulate(parse_schedule("0F0,0F1,0B0,0B1,0W0,0W1"))
    assert simulation.live_activations(0) == [(0, 1), (1, 2), (5, 1), (6, 0)]
    assert simulation.peak_activations == (2,)
    halves = simulate(parse_schedule("0F0,1F0,1BW0,0BW0"))
    assert halves.live_activations(0) == [(0, 0.5), (0.5, 1), (2, 0.5), (3, 0)]


def test_an_activation_that_ends_as_another_begins_is_not_counted_twice():
    simulation = simulate(make_schedule("1f1b", 4, 16))
    for rank, peak in enumerate(simulation.peak_activations):
        assert max(live for _, live in simulation.live_activations(rank)) == peak == 4 - rank


@pytest.mark.parametrize(
    ("durations", "said"),
    [
        ({"forward": -1.0}, "forward is -1.0"),
        ({"communication": float("inf")}, "communication is inf"),
        ({"backward": (1.0, float("nan"))}, "backward is nan"),
    ],
)
def test_durations_are_finite_and_not_negative(durations, said):
    with pytest.raises(ValueError, match=said):
        Durations(**durations)


def test_times_per_stage_must_be_as_many_as_stages():
    with pytest.raises(
        ValueError, match="weight has 2 times, but zb_v: 2 ranks, 4 stages, 3 microbatches; give one per stage"
    ):
        simulate(make_schedule("zb_v", 2, 3), Durations(weight=(1, 2)))


@pytest.mark.alone
def test_a_large_schedule_takes_well_under_a_second():
    started = time.process_time()
    schedule = make_schedule("interleaved_1f1b", 16, 64, chunks=8)
    assert validate(schedule) == []
    simulation = simulate(schedule)
    assert simulation.bubble_ratio == pytest.approx(15 * 3 / 8 / (15 * 3 / 8 + 192))
    assert max(simulation.peak_activations) == 16 * (1 + 15 / 128)
    assert time.process_time() - started < 2  # 0.2 s on one idle core


def test_durations_say_what_they_are():
    assert str(Durations()) == "F = 1, B = 1, W = 1 (a rank's share of a microbatch)"
    assert str(Durations(1, 2.5, (1, 2), 0.1, 3)) == (
        "F = 1, B = 2.5, communication = 0.1, F&B = 3 (a rank's share of a microbatch) with W given per stage"
    )

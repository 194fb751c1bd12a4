"""Traces of steps: what is recorded, and what it comes to, on events made by hand and as a simulation has them."""

import json
import re
import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from lightning_5d.pipeline_parallel import Durations, Kind, make_schedule, simulate
from lightning_5d.pipeline_parallel.trace import Event, Recorder, StepTrace
from lightning_5d.pipeline_parallel.trace.chart import draw_step, without_blinks
from lightning_5d.pipeline_parallel.trace.chrome import chrome_trace, lanes
from lightning_5d.pipeline_parallel.trace.clock import SharedClock, shared_clock
from lightning_5d.pipeline_parallel.trace.files import describe, draw_trace, write_data
from lightning_5d.pipeline_parallel.trace.page import step_page
from tests.pipeline_parallel.traces import trace_of

UNEVEN = Durations((1.0, 2.0), (1.5, 2.5), (0.5, 1.0), communication=0.25)
UNIT = Durations(1.0, 1.0, 1.0)
SCHEDULES = ["afab", "1f1b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe"]


def by_hand():
    """Two ranks, two microbatches: rank 0 waits from 2 to 7 and from 9 to 10, sends from 2 to 3 meanwhile; rank 1 ends at 10."""
    first = [
        Event("F", 0, 0, 0.0, 1.0, 1), Event("send", 1, 0, 1.0, 1.0, 1, 1, 8), Event("F", 0, 1, 1.0, 2.0, 2),
        Event("send", 1, 1, 2.0, 3.0, 2, 1, 8), Event("receive", 0, 0, 3.0, 7.0, 2, 1, 8), Event("BW", 0, 0, 7.0, 9.0, 1),
        Event("receive", 0, 1, 9.0, 9.5, 1, 1, 8), Event("BW", 0, 1, 10.0, 12.0, 0),
    ]  # fmt: skip
    second = [
        Event("receive", 1, 0, -1.0, 2.0, 0, 0, 8), Event("F", 1, 0, 2.0, 3.0, 1), Event("BW", 1, 0, 3.0, 6.0, 0),
        Event("send", 0, 0, 6.0, 6.5, 0, 0, 8), Event("receive", 1, 1, 6.0, 6.0, 0, 0, 8), Event("F", 1, 1, 6.0, 7.0, 1),
        Event("BW", 1, 1, 7.0, 9.0, 0), Event("send", 0, 1, 9.0, 9.5, 0, 0, 8),
    ]  # fmt: skip
    return StepTrace.of(4, make_schedule("1f1b", 2, 2), [[e.later(50) for e in events] for events in (first, second)])


def test_times_are_from_the_first_computation_on():
    trace = by_hand()
    assert trace.ranks[0][0] == Event("F", 0, 0, 0.0, 1.0, 1)
    assert trace.ranks[1][0] == Event("receive", 1, 0, -1.0, 2.0, 0, 0, 8)


def test_bubbles_are_those_of_the_papers():
    actual = by_hand().actual
    assert actual.busy == (6.0, 7.0)
    assert actual.period == actual.makespan == 12.0
    assert actual.bubble == (6.0, 5.0)
    assert actual.bubble_ratio == pytest.approx(11 / 24)
    assert actual.peak_activations == (2, 1)
    later = [Event("F", 0, 0, 0.0, 1.0, 1), Event("BW", 0, 0, 2.0, 3.0, 0)]
    staggered = StepTrace.of(1, make_schedule("afab", 2, 1), [later, [event.later(1.0) for event in later]])
    assert staggered.actual.period == 3.0
    assert staggered.actual.bubble_ratio == pytest.approx(1 / 3)
    assert staggered.actual.bubble_ratio_with_barrier == pytest.approx(1 / 2)


def test_activations_live_from_the_start_of_a_forward_to_the_end_of_its_backward():
    assert by_hand().actual.live_activations(0) == [(0.0, 1), (1.0, 2), (9.0, 1), (12.0, 0)]
    assert by_hand().actual.live_activations(1) == [(2.0, 1), (6.0, 0), (6.0, 1), (9.0, 0)]


def test_idle_time_is_told_apart_by_what_the_rank_did():
    trace = by_hand()
    assert [(gap.start, gap.end, gap.doing) for gap in trace.idle(0)] == [
        (2.0, 3.0, "send"), (3.0, 7.0, "receive"), (9.0, 9.5, "receive"), (9.5, 10.0, None),
    ]  # fmt: skip
    assert trace.idle_seconds(0) == {"receive": 4.5, "send": 1.0, "other": 0.5}
    assert trace.idle_seconds(1) == {"receive": 2.0, "send": 0.5, "other": 2.5}
    for rank in range(2):
        assert sum(trace.idle_seconds(rank).values()) == trace.actual.makespan - trace.actual.busy[rank]


def test_the_plan_takes_the_mean_times_of_each_stage():
    trace = by_hand()
    assert trace.durations == Durations((1.0, 1.0), (2.0, 2.5), (0.0, 0.0))
    assert trace.planned.busy == trace.actual.busy
    assert trace.planned.period == pytest.approx(1 + 1 + 2.5 + 1 + 2.5 + 2)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_that_runs_as_planned_has_the_bubble_and_the_activations_of_the_plan(name):
    schedule = make_schedule(name, 4, 8)
    ideal = simulate(schedule, Durations(0.01, 0.02, 0.01))
    trace = trace_of(schedule, Durations(0.01, 0.02, 0.01))
    assert trace.actual.bubble_ratio == pytest.approx(ideal.bubble_ratio)
    assert trace.actual.bubble_ratio_with_barrier == pytest.approx(ideal.bubble_ratio_with_barrier)
    assert trace.actual.busy == pytest.approx(trace.planned.busy)
    assert trace.actual.peak_activations == trace.planned.peak_activations == ideal.peak_activations
    if name != "dualpipe":  # what each of a pair took cannot be seen
        assert trace.planned.bubble_ratio == pytest.approx(ideal.bubble_ratio)
    assert trace.actual.timeline[1][5].entry == ideal.timeline[1][5].entry


def test_communication_is_what_a_step_has_more_than_its_plan():
    schedule = make_schedule("1f1b", 2, 4)
    trace = trace_of(schedule, UNEVEN)
    free = Durations((1.0, 2.0), (2.0, 3.5), (0.0, 0.0))
    assert trace.durations.forward == pytest.approx(free.forward)
    assert trace.durations.backward == pytest.approx(free.backward)
    assert trace.planned.period == pytest.approx(simulate(schedule, free).period)
    assert trace.actual.period == pytest.approx(simulate(schedule, UNEVEN).period)
    assert trace.actual.period > trace.planned.period


def test_a_stage_with_both_kinds_of_backward_is_planned_with_what_it_took_in_all():
    schedule = make_schedule("dualpipe", 2, 4)
    events = []
    for row in schedule.rows:
        at, of_rank = 0.0, []
        for cell in " ".join(entry.cell for entry in row).replace("+", " ").split():
            stage, kind, microbatch = re.fullmatch(r"(\d)(F|BW|B|W)(\d)", cell).groups()
            took = {"F": 1.0, "B": 2.0, "W": 3.0, "BW": 4.0}[kind]
            of_rank.append(Event(kind, int(stage), int(microbatch), at, at + took, 1))
            at += took
        events.append(of_rank)
    trace = StepTrace.of(1, schedule, events)
    assert {event.kind for event in trace.ranks[0]} == {"F", "B", "W", "BW"}
    assert sum(trace.planned.busy) == pytest.approx(sum(trace.actual.busy))


def test_messages_know_both_of_their_ends():
    found = [(a, send.stage, send.microbatch, b, receive.end) for a, send, b, receive in by_hand().messages()]
    assert sorted(found) == [(0, 1, 0, 1, 2.0), (0, 1, 1, 1, 6.0), (1, 0, 0, 0, 7.0), (1, 0, 1, 0, 9.5)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_message_of_every_schedule_is_found(name):
    schedule = make_schedule(name, 2 if name == "interleaved_1f1b" else 4, 8)
    trace = trace_of(schedule, Durations(0.01, 0.01, 0.01, 0.002))
    sent = sum(event.kind == "send" for events in trace.ranks for event in events)
    ends = list(trace.messages())
    assert len(ends) == sent > 0
    for sender, send, receiver, receive in ends:
        assert (send.peer, receive.peer) == (receiver, sender)
        assert send.microbatch == receive.microbatch
        assert send.stage == receive.stage
        assert send.start <= receive.end
    assert len({id(receive) for *_, receive in ends}) == sent


def test_a_trace_goes_to_a_file_and_back(tmp_path):
    trace = trace_of(make_schedule("dualpipe", 4, 8), Durations(0.1, 0.2, 0.1, 0.01))
    trace.save(tmp_path / "new" / "step.json")
    again = StepTrace.load(tmp_path / "new" / "step.json")
    assert again == trace
    assert again.schedule == trace.schedule
    assert again.actual == trace.actual
    (tmp_path / "other.json").write_text('{"format": 7}')
    with pytest.raises(ValueError, match=r"other\.json is not a trace of a pipeline's step"):
        StepTrace.load(tmp_path / "other.json")


def test_a_step_with_fewer_microbatches_is_compared_with_their_plan():
    few = trace_of(make_schedule("zb_h1", 4, 3), UNIT)
    trace = StepTrace.of(1, make_schedule("zb_h1", 4, 8), few.ranks)
    assert trace.schedule.microbatches == 3
    assert sum(map(len, trace.planned.timeline)) == sum(map(len, trace.actual.timeline)) == 4 * 3 * 3
    assert trace.planned.busy == pytest.approx(trace.actual.busy)


def test_events_of_too_few_ranks_are_refused():
    with pytest.raises(ValueError, match="events of 1 ranks, but 1f1b: 2 ranks"):
        StepTrace.of(1, make_schedule("1f1b", 2, 2), [[]])


# The recorder


def test_a_recorder_keeps_what_it_is_told_in_order():
    recorder = Recorder()
    before = time.perf_counter()
    outer = recorder.begin()
    inner = recorder.begin()
    time.sleep(0.01)
    recorder.end(inner, Kind.FORWARD, 1, 2, 3)
    recorder.end(outer, "receive", 1, 2, 3, peer=4, nbytes=5)
    receive, forward = recorder.take()
    assert (receive.kind, receive.peer, receive.nbytes) == ("receive", 4, 5)
    assert (forward.kind, forward.stage, forward.microbatch, forward.live, forward.peer) == ("F", 1, 2, 3, None)
    assert type(forward.kind) is str
    assert before <= receive.start <= forward.start < forward.end - 0.0099
    assert forward.end <= receive.end <= time.perf_counter()
    assert recorder.take() == ()


@pytest.mark.alone
def test_an_event_costs_less_than_2_microseconds():
    recorder = Recorder()

    def cost():
        start = time.thread_time()  # others may run meanwhile
        for microbatch in range(500):
            recorder.end(recorder.begin(), "F", 0, microbatch, 1)
        return (time.thread_time() - start) / 500

    assert min(cost() for _ in range(50)) < 2e-6
    assert len(recorder.take()) == 25000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_an_accelerator_times_are_those_of_the_work():
    device = torch.device("cuda")
    matrix = torch.randn(4096, 4096, device=device)
    _ = matrix @ matrix
    torch.cuda.synchronize()
    recorder = Recorder(device)
    start = time.perf_counter()
    mark = recorder.begin()
    for _ in range(40):
        _ = matrix @ matrix
    recorder.end(mark, "F", 0, 0, 1)
    asked = time.perf_counter() - start
    (event,) = recorder.take()
    whole = time.perf_counter() - start
    assert asked < event.seconds <= whole
    assert start - 1e-4 <= event.start
    assert event.end <= time.perf_counter()


# One clock


def _clocks(rank: int, ahead: float | None) -> tuple[SharedClock, float]:
    def now() -> float:
        return time.perf_counter() + (ahead or 0.0) * rank

    clock = shared_clock(dist.group.WORLD, torch.device("cpu"), host=None if ahead is None else f"host {rank}", now=now)
    return clock, clock.offset + now() - time.perf_counter()


def test_ranks_on_one_host_read_one_clock(ranks):
    assert [clock for clock, _ in ranks(2, _clocks, None, backend="gloo")] == [SharedClock(), SharedClock()]


def test_the_clocks_of_hosts_are_brought_together_within_the_error_that_is_said(ranks):
    found = ranks(3, _clocks, 5.0, backend="gloo")
    assert found[0][0].offset == 0.0
    for rank, (clock, left) in enumerate(found):
        assert clock.offset == pytest.approx(-5.0 * rank, abs=0.05)
        assert abs(left) <= clock.error + 1e-5
        assert 0 < clock.error < 0.05
    assert len({clock.error for clock, _ in found}) == 1


# Chrome and Perfetto


def test_lanes_hold_nothing_that_overlaps():
    assert lanes([(0, 2), (1, 3), (1, 2), (2, 4), (3, 5)]) == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "dualpipe"])
def test_a_chrome_trace_has_every_event_as_the_format_wants_it(name):
    schedule = make_schedule(name, 4, 8)
    trace = trace_of(schedule, Durations(0.01, 0.02, 0.01, 0.001))
    data = json.loads(json.dumps(chrome_trace(trace)))
    events = data["traceEvents"]
    needed = {
        "M": {"name", "pid", "args"},
        "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
        "C": {"name", "pid", "ts", "args"},
    }
    needed |= {"s": {"name", "cat", "id", "pid", "tid", "ts"}, "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"}}
    for event in events:
        assert needed[event["ph"]] <= set(event)
    boxes = [event for event in events if event["ph"] == "X"]
    recorded = sum(map(len, trace.ranks))
    assert len([box for box in boxes if box["cat"] != "planned"]) == recorded
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {names[rank, 0] for rank in range(4)} == {"compute"}
    for box in boxes:
        assert names[box["pid"], box["tid"]].split()[0] == box["cat"]
    first = next(box for box in boxes if box["cat"] == "compute" and box["name"] == "F stage 0 microbatch 0")
    assert (first["ts"], first["args"]["live"]) == (0.0, 1)
    assert first["dur"] == pytest.approx(1e6 * trace.ranks[0][0].seconds, abs=1e-3)
    for thread in names:
        mine = sorted((b["ts"], b["ts"] + b["dur"]) for b in boxes if (b["pid"], b["tid"]) == thread)
        assert all(later[0] >= earlier[1] - 2e-3 for earlier, later in pairwise(mine))
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert set(starts) == set(ends)
    assert len(starts) == sum(event.kind == "send" for of_rank in trace.ranks for event in of_rank)
    for number, end in ends.items():
        assert any(
            b["ts"] <= end["ts"] <= b["ts"] + b["dur"] + 2e-3 and b["cat"] == "receive"
            for b in boxes
            if (b["pid"], b["tid"]) == (end["pid"], end["tid"])
        )
        assert starts[number]["pid"] != end["pid"]
    counters = [event["args"]["microbatches"] for event in events if event["ph"] == "C" and event["pid"] == 0]
    assert max(counters) == trace.actual.peak_activations[0]
    assert counters[-1] == 0
    assert data["otherData"]["bubble"] == trace.actual.bubble_ratio


# Pictures


@pytest.fixture(scope="module")
def drawn():
    return trace_of(make_schedule("zb_h1", 4, 8), Durations(0.01, 0.012, 0.008, 0.002))


def test_the_picture_has_the_plan_above_what_ran_on_one_clock(drawn):
    above, below, memory, table = draw_step(drawn).axes
    assert above.get_title(loc="left").startswith("zb_h1: 4 ranks, 4 stages, 8 microbatches, planned: bubble ")
    assert (
        below.get_title(loc="left") == f"as it ran in step 3, on the same clock: bubble {drawn.actual.bubble_ratio:.1%}"
    )
    assert above.get_xlim() == below.get_xlim() == memory.get_xlim() == (0, pytest.approx(1000 * drawn.actual.makespan))
    assert memory.get_xlabel() == "time in ms"
    assert [max(line.get_ydata()) for line in memory.lines] == [4, 4]
    cells = {place: cell.get_text().get_text() for place, cell in table.tables[0].get_celld().items()}
    assert [cells[row, 0] for row in (1, 2)] == ["planned", "as it ran"]
    assert cells[2, 4] == f"{drawn.actual.bubble_ratio:.1%}"
    assert cells[1, 2] == f"{1000 * drawn.planned.period:.2f}".rstrip("0").rstrip(".") + " ms"


def test_nothing_in_the_picture_lies_outside_or_on_top_of_another(drawn):
    figure = draw_step(drawn)
    figure.draw_without_rendering()
    texts = [figure.legends[0], *(text for axes in figure.axes for text in axes.texts)]
    for text in texts:
        box = text.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
    for axes in figure.axes[:2]:
        title = axes._left_title.get_window_extent()
        note = next(text for text in axes.texts if text.get_text() == "bubble in ms | peak").get_window_extent()
        assert title.x1 < note.x0


def test_short_dips_between_a_backward_and_the_next_forward_are_not_drawn():
    steps = [(0.0, 1.0), (5.0, 0.0), (5.01, 1.0), (9.0, 2.0), (9.01, 1.0), (10.0, 0.0)]
    assert without_blinks(steps, 0.1) == ((0.0, 1.0), (5.01, 1.0), (9.0, 2.0), (9.01, 1.0), (10.0, 0.0))


def test_the_page_needs_no_network_and_carries_every_event(drawn):
    page = step_page(drawn)
    assert not re.search(r"https?://|src=|@import|url\(|<link", page)
    assert "prefers-color-scheme: dark" in page
    data = json.loads(re.search(r"const data = (.*);\n", page)[1])
    shown = {
        side: [row["boxes"] for row in data["rows"] if row["side"] == side]
        for side in ("planned", "as it ran", "messages")
    }
    computed = [[event for event in events if event.computes] for events in drawn.ranks]
    for boxes, events in zip(shown["as it ran"], computed, strict=True):
        assert [tuple(box[:3]) for box in boxes] == [(e.kind, e.stage, e.microbatch) for e in events]
        assert [box[3] for box in boxes] == pytest.approx([e.start for e in events])
        assert [box[5] for box in boxes] == [e.live for e in events]
    assert sum(map(len, shown["planned"])) == sum(map(len, computed))
    messages = [box for boxes in shown["messages"] for box in boxes]
    assert {box[0] for box in messages} == {"send", "receive"}
    assert {box[7] for box in messages} == {64}
    assert page.count('class="box"') == 2 * sum(map(len, computed))
    assert data["until"] == pytest.approx(max(drawn.actual.makespan, drawn.planned.makespan))
    assert f"<td>{drawn.actual.bubble_ratio:.1%}</td>" in page


def test_all_files_are_written_under_the_name_of_the_step(drawn, tmp_path):
    files = write_data(drawn, tmp_path) + draw_trace(drawn, tmp_path)
    assert [path.name for path in files] == [
        "step000003.json",
        "step000003.chrome.json",
        "step000003.png",
        "step000003.html",
    ]
    assert (tmp_path / "step000003.png").read_bytes().startswith(b"\x89PNG")
    assert StepTrace.load(files[0]) == drawn
    assert describe(drawn).startswith(f"zb_h1, step 3: bubble {drawn.actual.bubble_ratio:.1%} measured, ")

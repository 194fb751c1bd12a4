"""Traces for the viewers of Chrome (``chrome://tracing``) and Perfetto (<https://ui.perfetto.dev>)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_5d.pipeline_parallel.schedule import Kind, actions_of
from lightning_5d.pipeline_parallel.trace.recorder import RECEIVE, SEND, Event
from lightning_5d.pipeline_parallel.trace.step import StepTrace

_COLOURS = {
    Kind.FORWARD: "rail_response",
    Kind.BACKWARD: "thread_state_running",
    Kind.INPUT_GRADIENT: "background_memory_dump",
    Kind.WEIGHT_GRADIENT: "thread_state_iowait",
}
"""Chrome's names for the blue, green, teal and amber of the charts. Perfetto has colours of its own."""

_LANES = {"compute": 0, SEND: 10, RECEIVE: 20, "planned": 30}
"""Numbers of the threads; where things of one lane overlap, the next numbers are taken."""


def chrome_trace(trace: StepTrace) -> dict[str, Any]:
    """A trace as JSON objects in the Trace Event Format.

    A process per rank, with threads for computations, sends, receives and the planned computations; arrows from sends to their
    receives; a counter of live activations. Times are in microseconds from the step's first computation.
    """
    events: list[dict[str, Any]] = []
    threads: dict[int, int] = {}
    for rank, of_rank in enumerate(trace.ranks):
        events += _metadata(rank, "process_name", name=f"rank {rank} of the pipeline")
        events += _metadata(rank, "process_sort_index", sort_index=rank)
        for lane in ("compute", SEND, RECEIVE):
            chosen = [event for event in of_rank if ("compute" if event.computes else event.kind) == lane]
            rows = [_row(event, lane) for event in chosen]
            boxes, numbers = _boxes(rank, lane, rows)
            events += boxes
            threads |= {id(event): number for event, number in zip(chosen, numbers, strict=True)}
        events += _boxes(rank, "planned", list(_planned(trace, rank)))[0]
        for time, live in trace.actual.live_activations(rank):
            counter = {"name": "live activations", "ph": "C", "pid": rank, "ts": _us(time)}
            events.append({**counter, "args": {"microbatches": live}})
    for number, (sender, send, receiver, receive) in enumerate(trace.messages()):
        flow = {"name": "message", "cat": "message", "id": number}
        events.append({**flow, "ph": "s", "pid": sender, "tid": threads[id(send)], "ts": _us(send.start)})
        # An arrow ends inside of a box, not where it ends, to be tied to it.
        inside = _us(receive.end - 1e-3 * receive.seconds)
        events.append({**flow, "ph": "f", "bp": "e", "pid": receiver, "tid": threads[id(receive)], "ts": inside})
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "step": trace.step,
            "schedule": trace.schedule.title,
            "bubble": trace.actual.bubble_ratio,
            "bubble planned": trace.planned.bubble_ratio,
            "clock error in seconds": trace.clock_error,
        },
    }


Row = tuple[float, float, str, str, str, dict[str, Any]]


def _planned(trace: StepTrace, rank: int) -> Iterator[Row]:
    for span in trace.planned.timeline[rank]:
        for action in actions_of(span.entry):
            name = _name(action.kind, action.stage, action.microbatch)
            arguments = {"stage": action.stage, "microbatch": action.microbatch}
            yield span.start, span.end, name, "planned", action.kind, arguments


def _row(event: Event, lane: str) -> Row:
    message = {} if event.computes else {"peer": event.peer, "bytes": event.nbytes}
    arguments = {"stage": event.stage, "microbatch": event.microbatch, **message, "live": event.live}
    return event.start, event.end, _name(event.kind, event.stage, event.microbatch), lane, event.kind, arguments


def _boxes(rank: int, lane: str, rows: list[Row]) -> tuple[list[dict[str, Any]], list[int]]:
    """The boxes of a lane with the names of its threads, and the thread of each."""
    threads = [_LANES[lane] + number for number in lanes([(start, end) for start, end, *_ in rows])]
    boxes: list[dict[str, Any]] = []
    for thread in sorted({_LANES[lane], *threads}):
        number = thread - _LANES[lane]
        boxes += _metadata(rank, "thread_name", thread, name=lane if number == 0 else f"{lane} {number + 1}")
        boxes += _metadata(rank, "thread_sort_index", thread, sort_index=thread)
    for (start, end, name, category, kind, arguments), thread in zip(rows, threads, strict=True):
        box = {"name": name, "cat": category, "ph": "X", "pid": rank, "tid": thread}
        colour = {"cname": _COLOURS[Kind(kind)]} if kind in _COLOURS else {}
        boxes.append({**box, "ts": _us(start), "dur": _us(end - start), **colour, "args": arguments})
    return boxes, threads


def lanes(stretches: list[tuple[float, float]]) -> list[int]:
    """For stretches in the order they begin, the first lane in which each overlaps none before it."""
    ends: list[float] = []
    chosen = []
    for start, end in stretches:
        lane = next((number for number, taken in enumerate(ends) if taken <= start), len(ends))
        ends[lane : lane + 1] = [end]
        chosen.append(lane)
    return chosen


def _metadata(rank: int, what: str, thread: int = 0, **arguments: Any) -> list[dict[str, Any]]:
    return [{"name": what, "ph": "M", "pid": rank, "tid": thread, "args": arguments}]


def _name(kind: str, stage: int, microbatch: int) -> str:
    return f"{kind} stage {stage} microbatch {microbatch}"


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)

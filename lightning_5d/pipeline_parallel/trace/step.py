"""One step as it really ran, on all ranks of a pipeline, on one clock."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_5d.pipeline_parallel.schedule import (
    GRADIENTS,
    Action,
    Kind,
    Overlap,
    Schedule,
    actions_of,
    keep_microbatches,
)
from lightning_5d.pipeline_parallel.simulate import Durations, Simulation, simulate
from lightning_5d.pipeline_parallel.table import format_schedule, parse_schedule
from lightning_5d.pipeline_parallel.timeline import Span, Timeline
from lightning_5d.pipeline_parallel.trace.recorder import RECEIVE, SEND, Event

_FORMAT = 1
_PART = {Kind.FORWARD: 1, Kind.INPUT_GRADIENT: 1, Kind.WEIGHT_GRADIENT: 1, Kind.BACKWARD: 2}
_BACKWARDS = (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.BACKWARD)


@dataclass(frozen=True, slots=True)
class Idle:
    """A stretch in which a rank computed nothing.

    Attributes:
        start: In seconds.
        end: In seconds.
        doing: ``"receive"`` while it waited for a message, ``"send"`` while it sent one, else ``None``.
    """

    start: float
    end: float
    doing: str | None


@dataclass(frozen=True)
class Measured(Timeline):
    """A schedule on the clock as it really ran; activations are those that were counted.

    Attributes:
        live: For each rank, when the number of kept activations changed, and to what, in the unit of `peak_activations`.
    """

    live: tuple[tuple[tuple[float, float], ...], ...] = field(repr=False)

    def live_activations(self, rank: int) -> list[tuple[float, float]]:
        """When the number of kept activations changed on a rank, and to what."""
        return list(self.live[rank])


@dataclass(frozen=True)
class StepTrace:
    """What every rank of a pipeline did in one step.

    Attributes:
        step: Number of the optimizer step, from 1.
        schedule: What was to be run.
        ranks: For each rank of the pipeline its events, in the order they began. The first computation of all begins at 0 seconds;
            a rank may have waited for a message before that.
        clock_error: By how many seconds the clocks of two ranks may differ at most; 0 on one host.
        data_rank: Which of the data-parallel copies of the pipeline it is.
    """

    step: int
    schedule: Schedule
    ranks: tuple[tuple[Event, ...], ...] = field(repr=False)
    clock_error: float = 0.0
    data_rank: int = 0

    def __post_init__(self) -> None:
        if len(self.ranks) != self.schedule.ranks:
            raise ValueError(
                f"There are events of {len(self.ranks)} ranks, but {self.schedule.title}; give all of them."
            )

    @classmethod
    def of(
        cls,
        step: int,
        schedule: Schedule,
        ranks: Sequence[Sequence[Event]],
        *,
        clock_error: float = 0.0,
        data_rank: int = 0,
    ) -> StepTrace:
        """A trace of events on any clock that all ranks share.

        Args:
            step: As in the class.
            schedule: That of a whole step; of one with fewer microbatches, only those that ran are kept.
            ranks: Events of each rank, in any order.
            clock_error: As in the class.
            data_rank: As in the class.
        """
        first = min((event.start for events in ranks for event in events if event.computes), default=0.0)
        moved = tuple(
            tuple(event.later(-first) for event in sorted(events, key=lambda event: (event.start, event.end)))
            for events in ranks
        )
        ran = max((event.microbatch + 1 for events in ranks for event in events), default=0)
        if 0 < ran < schedule.microbatches:
            kept = {number: number for number in range(ran)}
            rows = tuple(keep_microbatches(row, kept) for row in schedule.rows)
            schedule = replace(schedule, copies=schedule.copies[:ran], rows=rows)
        return cls(step, schedule, moved, clock_error, data_rank)

    # What it comes to

    @cached_property
    def actual(self) -> Measured:
        """The computations on the clock. Bubble, period and the like are defined as for simulations."""
        share = self.schedule.ranks / self.schedule.stages
        spans = tuple(tuple(_spans(events)) for events in self.ranks)
        live = tuple(tuple((time, count * share) for time, count in _live(events)) for events in self.ranks)
        return Measured(self.schedule, spans, live)

    @cached_property
    def durations(self) -> Durations:
        """What actions took, as means for each stage. Simulated with them, a rank computes as long as it really did.

        The time of two that ran at once belongs to both, so it is told apart as if a forward took half as long as a fused backward.
        """
        seconds: dict[tuple[Kind, int], list[float]] = defaultdict(list)
        for spans in self.actual.timeline:
            for span in spans:
                actions = actions_of(span.entry)
                parts = [_PART[action.kind] for action in actions]
                for action, part in zip(actions, parts, strict=True):
                    seconds[action.kind, action.stage].append((span.end - span.start) * part / sum(parts))
        stages = range(self.schedule.stages)
        halves = [_halves(*(seconds[kind, stage] for kind in _BACKWARDS)) for stage in stages]
        return Durations(
            tuple(_mean(seconds[Kind.FORWARD, stage]) for stage in stages),
            tuple(backward for backward, _ in halves),
            tuple(weight for _, weight in halves),
        )

    @cached_property
    def planned(self) -> Simulation:
        """The schedule as it would run if each action took the mean of what it took here, and messages nothing."""
        return simulate(self.schedule, self.durations)

    def idle(self, rank: int) -> list[Idle]:
        """Everything between, before and after the computations of a rank until the last rank is through."""
        at = 0.0
        gaps: list[Idle] = []
        messages = [event for event in self.ranks[rank] if not event.computes]
        for start, end in [
            *((span.start, span.end) for span in self.actual.timeline[rank]),
            (self.actual.makespan,) * 2,
        ]:
            if start > at:
                gaps += _parts(at, start, messages)
            at = max(at, end)
        return gaps

    def idle_seconds(self, rank: int) -> dict[str, float]:
        """The time of `idle` by what it went to: ``"receive"``, ``"send"`` and ``"other"``."""
        sums = {RECEIVE: 0.0, SEND: 0.0, "other": 0.0}
        for gap in self.idle(rank):
            sums[gap.doing or "other"] += gap.end - gap.start
        return sums

    def messages(self) -> Iterator[tuple[int, Event, int, Event]]:
        """Each message with both of its ends: sending rank and event, receiving rank and event."""
        receives: dict[tuple[int, int, int, bool], tuple[int, Event]] = {}
        for rank, events in enumerate(self.ranks):
            for event, gradient in _directions(events, RECEIVE):
                receives[rank, event.stage, event.microbatch, gradient] = rank, event
        for rank, events in enumerate(self.ranks):
            for event, gradient in _directions(events, SEND):
                found = receives.get(
                    (-1 if event.peer is None else event.peer, event.stage, event.microbatch, gradient)
                )
                if found is not None:
                    yield rank, event, *found

    # To a file and back

    def save(self, path: Path) -> None:
        """Writes everything as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_json(), indent=1))

    def as_json(self) -> dict[str, Any]:
        """Everything in JSON's types; the schedule as a table."""
        return {
            "format": _FORMAT,
            "step": self.step,
            "data_rank": self.data_rank,
            "clock_error": self.clock_error,
            "schedule": format_schedule(self.schedule),
            "ranks": [[asdict(event) for event in events] for events in self.ranks],
        }

    @classmethod
    def load(cls, path: Path) -> StepTrace:
        """Reads what `save` wrote.

        Raises:
            ValueError: If the file is something else.
        """
        data = json.loads(path.read_text())
        if not isinstance(data, dict) or data.get("format") != _FORMAT or "ranks" not in data:
            raise ValueError(
                f"{path} is not a trace of a pipeline's step; PipelineTrace writes them as stepNNNNNN.json."
            )
        ranks = tuple(tuple(Event(**event) for event in events) for events in data["ranks"])
        return cls(data["step"], parse_schedule(data["schedule"]), ranks, data["clock_error"], data["data_rank"])


def _mean(seconds: Sequence[float]) -> float:
    return sum(seconds) / len(seconds) if seconds else 0.0


def _halves(inputs: Sequence[float], weights: Sequence[float], fused: Sequence[float]) -> tuple[float, float]:
    """Mean times of B and W of a stage, such that B, W and B + W for each fused backward make up all that was measured."""
    if not inputs:
        return _mean(fused), 0.0
    backward, weight = _mean(inputs), _mean(weights)
    expected = backward * (len(inputs) + len(fused)) + weight * (len(weights) + len(fused))
    factor = (sum(inputs) + sum(weights) + sum(fused)) / expected if fused and expected else 1.0
    return backward * factor, weight * factor


def _spans(events: Sequence[Event]) -> Iterator[Span]:
    """The computations of a rank; two that ran at the same time become a pair."""
    waiting: Event | None = None
    until = 0.0
    for event in (event for event in events if event.computes):
        if waiting is None:
            waiting = event
            continue
        forward = Kind.FORWARD in (waiting.kind, event.kind) and waiting.kind != event.kind
        if forward and event.start < waiting.end:
            pair = sorted((waiting, event), key=lambda one: one.kind != Kind.FORWARD)
            until = max(waiting.end, event.end)
            yield Span(Overlap(*map(_action, pair)), waiting.start, until)
            waiting = None
        else:
            yield _span(waiting, until)
            until, waiting = waiting.end, event
    if waiting is not None:
        yield _span(waiting, until)


def _span(event: Event, earliest: float) -> Span:
    return Span(_action(event), min(max(event.start, earliest), event.end), event.end)


def _action(event: Event) -> Action:
    return Action(Kind(event.kind), event.stage, event.microbatch)


def _live(events: Sequence[Event]) -> list[tuple[float, int]]:
    """When the number of activations changed: with the start of a forward, with the end of anything else."""
    changes = [
        (event.start if event.kind == Kind.FORWARD else event.end, event.live) for event in events if event.computes
    ]
    changes.sort(key=lambda change: change[0])
    return [
        (time, live) for number, (time, live) in enumerate(changes) if number == 0 or live != changes[number - 1][1]
    ]


def _parts(start: float, end: float, messages: Sequence[Event]) -> Iterator[Idle]:
    """A gap, cut where messages began and ended."""
    inside = [event for event in messages if event.start < end and event.end > start]
    edges = sorted({start, end, *(min(max(at, start), end) for event in inside for at in (event.start, event.end))})
    for left, right in pairwise(edges):
        kinds = {event.kind for event in inside if event.start <= left and event.end >= right}
        yield Idle(left, right, RECEIVE if RECEIVE in kinds else SEND if SEND in kinds else None)


def _directions(events: Sequence[Event], kind: str) -> Iterator[tuple[Event, bool]]:
    """The messages of one kind, and whether each carries a gradient.

    Gradients for a stage are sent after the backward of the next one, and received after the stage's own forward.
    """
    begun = {(event.kind, event.stage, event.microbatch): event.start for event in events if event.computes}
    for event in events:
        if event.kind != kind:
            continue
        if kind == RECEIVE:
            after = begun.get((Kind.FORWARD, event.stage, event.microbatch))
            yield event, after is not None and event.end > after
        else:
            made = (begun.get((each, event.stage + 1, event.microbatch)) for each in GRADIENTS)
            yield event, any(start is not None and event.start >= start for start in made)

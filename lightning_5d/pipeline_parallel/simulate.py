"""How long a schedule takes and how much it keeps, from the durations of its parts."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from lightning_5d.pipeline_parallel.schedule import Action, Kind, Row, Schedule, actions_of
from lightning_5d.pipeline_parallel.timeline import Span, Timeline, change_in_live
from lightning_5d.pipeline_parallel.validate import Result, check, needs_of, results_of

Time = float | tuple[float, ...]


@dataclass(frozen=True)
class Durations:
    """What the parts of a microbatch cost, in any unit of time.

    A number is the time of 1/ranks of the model for one microbatch: where a rank holds v stages of a model, each takes a v-th
    of it, so that schedules with different numbers of stages compare. A tuple gives the time of every stage as it is.

    Attributes:
        forward: F.
        backward: B, the gradient of the input.
        weight: W, the gradient of the weights. A fused backward takes ``backward + weight``.
        communication: From the end of an action to where its result is on another rank; nothing between stages of one rank.
        overlapped: F&B, a forward woven into a fused backward, per rank's share. By default the sum of its parts. For a pair
            whose backward is an input gradient alone, the sum is shortened in the same proportion.

    Raises:
        ValueError: If a duration is negative or not finite.
    """

    forward: Time = 1.0
    backward: Time = 1.0
    weight: Time = 1.0
    communication: float = 0.0
    overlapped: float | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "weight", "communication", "overlapped"):
            value = getattr(self, name)
            for time in value if isinstance(value, tuple) else (value,):
                if time is not None and not (math.isfinite(time) and time >= 0):
                    raise ValueError(f"Duration {name} is {time}; it must be a finite number from 0 on.")

    def __str__(self) -> str:
        times = {"F": self.forward, "B": self.backward, "W": self.weight}
        if self.communication:
            times["communication"] = self.communication
        if self.overlapped is not None:
            times["F&B"] = self.overlapped
        tuples = [name for name, time in times.items() if isinstance(time, tuple)]
        parts = [f"{name} = {time:g}" for name, time in times.items() if not isinstance(time, tuple)]
        share = ["(a rank's share of a microbatch)"] if parts else []
        return " ".join(
            (", ".join(parts), *share, *(["with", " and ".join(tuples), "given per stage"] if tuples else []))
        )

    def per_stage(self, schedule: Schedule) -> dict[Kind, tuple[float, ...]]:
        """Time of each kind of action on each stage.

        Raises:
            ValueError: If a tuple does not have one time per stage.
        """
        share = schedule.ranks / schedule.stages
        times: dict[Kind, tuple[float, ...]] = {}
        for kind, name in _NAMES.items():
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != schedule.stages:
                raise ValueError(
                    f"Duration {name} has {len(value)} times, but {schedule.title}; give one per stage, or one number for all."
                )
            times[kind] = value if isinstance(value, tuple) else (value * share,) * schedule.stages
        parts = zip(times[Kind.INPUT_GRADIENT], times[Kind.WEIGHT_GRADIENT], strict=True)
        times[Kind.BACKWARD] = tuple(backward + weight for backward, weight in parts)
        return times


_NAMES = {Kind.FORWARD: "forward", Kind.INPUT_GRADIENT: "backward", Kind.WEIGHT_GRADIENT: "weight"}


@dataclass(frozen=True)
class Simulation(Timeline):
    """A schedule on the clock, as it runs when its parts cost what they should.

    Attributes:
        durations: What its parts cost.
    """

    durations: Durations

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """The most activations that each rank keeps at a time, as the function `peak_activations` counts them."""
        return peak_activations(self.schedule)


def simulate(schedule: Schedule, durations: Durations | None = None) -> Simulation:
    """Runs a schedule on the clock: every rank starts each entry as soon as the entry before it and its inputs are done.

    Args:
        schedule: A schedule, complete or not.
        durations: What its parts cost; by default F = B = W = 1 per rank's share, and communication nothing.

    Raises:
        ValueError: If an action waits for one that never comes (the error says for which), or durations do not fit the schedule.
    """
    durations = durations or Durations()
    times = durations.per_stage(schedule)
    stages = schedule.stages
    ends: dict[Result, tuple[float, int]] = {}
    waiting: dict[Result, list[int]] = defaultdict(list)
    timeline: list[list[Span]] = [[] for _ in schedule.rows]
    ready = list(range(schedule.ranks))
    while ready:
        rank = ready.pop()
        row, spans = schedule.rows[rank], timeline[rank]
        while len(spans) < len(row):
            entry = row[len(spans)]
            actions = actions_of(entry)
            needs = [need for action in actions for need in needs_of(action, stages)]
            missing = next((need for need in needs if need not in ends), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            start = spans[-1].end if spans else 0.0
            for need in needs:
                end, owner = ends[need]
                start = max(start, end if owner == rank else end + durations.communication)
            end = start + _duration(actions, times, durations, schedule)
            spans.append(Span(entry, start, end))
            for action in actions:
                for result in results_of(action):
                    ends[result] = (end, rank)
                    ready.extend(waiting.pop(result, ()))
    if any(len(spans) < len(row) for spans, row in zip(timeline, schedule.rows, strict=True)):
        check(schedule)
    return Simulation(schedule, tuple(map(tuple, timeline)), durations)


def peak_activations(schedule: Schedule) -> tuple[float, ...]:
    """The most activations that each rank keeps at any time.

    An activation is kept from the start of its forward to the end of its weight gradient (its fused backward, if that is
    what the schedule has), as in the papers. It depends on the order of the actions only, not on what they cost.

    Returns:
        For each rank, microbatches of 1/ranks of the model: where a rank holds v stages, the activations of one stage count
        as 1/v. In a bidirectional pipeline a rank holds two stages of full size, and each counts as 1.
    """
    return tuple(_peak(row) * schedule.ranks / schedule.stages for row in schedule.rows)


def _peak(row: Row) -> int:
    live = peak = 0
    for entry in row:
        for action in actions_of(entry):  # of a pair, the forward comes first: both activations are there at once
            live += change_in_live(action)
            peak = max(peak, live)
    return peak


def _duration(
    actions: tuple[Action, ...], times: dict[Kind, tuple[float, ...]], durations: Durations, schedule: Schedule
) -> float:
    alone = sum(times[action.kind][action.stage] for action in actions)
    if len(actions) == 1 or durations.overlapped is None:
        return alone
    stage = actions[1].stage
    fused = times[Kind.FORWARD][actions[0].stage] + times[Kind.BACKWARD][stage]
    return durations.overlapped * schedule.ranks / schedule.stages * (alone / fused if fused else 1.0)

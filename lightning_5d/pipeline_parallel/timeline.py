"""A schedule on the clock, whether computed or measured: when each rank does what, and what that comes to."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

from lightning_5d.pipeline_parallel.schedule import Action, Entry, Kind, Schedule, actions_of


@dataclass(frozen=True, slots=True)
class Span:
    """An entry of a rank and when it runs."""

    entry: Entry
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each rank does what.

    Two times of a step are told apart. With a barrier between steps (a global gradient norm, say) a step takes `makespan`,
    from the first action of any rank to the last of any. Without one, each rank begins the next step as soon as it is through
    with this one, and a step takes `period`: the longest way of one rank from its own first to its own last action. Papers
    count bubbles in the second way; only where ranks end one after the other, as in ZB-H2 and ZB-V, does it differ.

    Attributes:
        schedule: What runs.
        timeline: For each rank, its entries with their times. The first one of all begins at 0.
    """

    schedule: Schedule
    timeline: tuple[tuple[Span, ...], ...] = field(repr=False)

    @cached_property
    def makespan(self) -> float:
        """Time from the first action of a step to its last."""
        return max((spans[-1].end for spans in self.timeline if spans), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time that each rank computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.timeline)

    @cached_property
    def period(self) -> float:
        """Time between the same action of two steps that follow each other without a barrier."""
        return max((spans[-1].end - spans[0].start for spans in self.timeline if spans), default=0.0)

    @property
    def bubble(self) -> tuple[float, ...]:
        """Idle time of each rank in a `period`."""
        return tuple(self.period - busy for busy in self.busy)

    @property
    def bubble_ratio(self) -> float:
        """Share of all ranks' time that is bubble, between 0 and 1; the (p - 1)/(m + p - 1) of GPipe."""
        return _ratio(self.busy, self.period)

    @property
    def bubble_ratio_with_barrier(self) -> float:
        """The same when all ranks wait for the last one after each step."""
        return _ratio(self.busy, self.makespan)

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """The most activations that each rank keeps at a time, in microbatches of 1/ranks of the model."""
        lives = (self.live_activations(rank) for rank in range(self.schedule.ranks))
        return tuple(max((live for _, live in steps), default=0.0) for steps in lives)

    def live_activations(self, rank: int) -> list[tuple[float, float]]:
        """When the number of kept activations changes on a rank, and to what, in the unit of `peak_activations`."""
        share = self.schedule.ranks / self.schedule.stages
        changes: dict[float, int] = defaultdict(int)
        for span in self.timeline[rank]:
            for action in actions_of(span.entry):
                changes[span.start if action.kind is Kind.FORWARD else span.end] += change_in_live(action)
        live, steps = 0, []
        for time in sorted(time for time, change in changes.items() if change):
            live += changes[time]
            steps.append((time, live * share))
        return steps


def change_in_live(action: Action) -> int:
    """By how many an action changes the number of activations that its rank keeps."""
    return {Kind.FORWARD: 1, Kind.INPUT_GRADIENT: 0, Kind.WEIGHT_GRADIENT: -1, Kind.BACKWARD: -1}[action.kind]


def _ratio(busy: tuple[float, ...], time: float) -> float:
    return 1 - sum(busy) / (len(busy) * time) if time else 0.0

"""What one rank does in a schedule, with the messages it takes part in: made once, run in every step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_5d.pipeline_parallel.schedule import GRADIENTS, Action, Kind, Schedule, flatten, keep_microbatches


@dataclass(frozen=True, slots=True)
class Message:
    """An activation on its way to a stage, or a gradient on its way back to it.

    Attributes:
        gradient: Which of the two.
        stage: The stage that receives it.
        microbatch: Of which microbatch.
    """

    gradient: bool
    stage: int
    microbatch: int

    def __str__(self) -> str:
        what = "gradient" if self.gradient else "activation"
        return f"the {what} for stage {self.stage}, microbatch {self.microbatch}"


@dataclass(frozen=True, slots=True)
class Step:
    """An action with what surrounds it.

    Attributes:
        action: What is computed.
        source: The rank that the action's input comes from; ``None`` for this rank, or if it needs none.
        target: The rank that its result goes to; ``None`` for this rank, or if nobody waits for it.
        gradients: Whether it makes gradients of weights.
        complete: Whether they are the last of its stage.
        partly: Whether it may make some of them, and a later action the others.
    """

    action: Action
    source: int | None
    target: int | None
    gradients: bool
    complete: bool
    partly: bool


@dataclass(frozen=True)
class Program:
    """One rank's part of a schedule.

    Attributes:
        schedule: Where it is from.
        rank: Whose it is.
        microbatches: How many there are, no more than the schedule's.
        backward: Whether there are backwards.
        steps: The actions of the rank in order.
        incoming: By sending rank, what comes from there, in the order in which it is sent.
        last_stage_ranks: The ranks that run the last stage, each for some of the microbatches.
        settles: How many steps the rank can make before it must know whether the weights are final; all are forwards.
        early: By sending rank, how many of the messages from there it sends before it must know.
    """

    schedule: Schedule
    rank: int
    microbatches: int
    backward: bool
    steps: tuple[Step, ...]
    incoming: dict[int, tuple[Message, ...]]
    last_stage_ranks: tuple[int, ...]
    settles: int
    early: dict[int, int]


def program_of(schedule: Schedule, rank: int, microbatches: int, backward: bool) -> Program:
    """A rank's part of a schedule that has these microbatches only.

    What is left of a schedule that can run can still run, because no microbatch waits for another, and no forward for a
    backward: so a last, small batch and an evaluation need no schedule of their own.

    Args:
        schedule: The schedule of a whole training step.
        rank: The rank.
        microbatches: How many there are; the first ones of the schedule.
        backward: Whether gradients are wanted.

    Raises:
        ValueError: If the schedule has fewer microbatches.
    """
    if microbatches > schedule.microbatches:
        raise ValueError(f"{schedule.title} was asked for {microbatches} microbatches; it has {schedule.microbatches}.")
    kept = {index: index for index in range(microbatches)}
    rows = [
        [action for action in flatten(keep_microbatches(row, kept)) if backward or action.kind is Kind.FORWARD]
        for row in schedule.rows
    ]
    incoming: dict[int, list[Message]] = defaultdict(list)
    for sender, actions in enumerate(rows):
        for action in actions:
            message = _result(schedule, action)
            if message is not None and sender != rank == schedule.rank_of(message.stage, message.microbatch):
                incoming[sender].append(message)
    settles = settling_points(schedule, rows)
    early = {
        sender: len({_result(schedule, action) for action in rows[sender][: settles[sender]]}.intersection(messages))
        for sender, messages in incoming.items()
    }
    last = {action.stage: action for action in rows[rank] if _adds_up(action)}
    last_stage = schedule.stages - 1
    return Program(
        schedule,
        rank,
        microbatches,
        backward,
        tuple(_step(schedule, rank, action, last) for action in rows[rank]),
        {sender: tuple(messages) for sender, messages in incoming.items()},
        tuple(sorted({schedule.rank_of(last_stage, microbatch) for microbatch in range(microbatches)})),
        settles[rank],
        early,
    )


def settling_points(schedule: Schedule, rows: Sequence[Sequence[Action]]) -> list[int]:
    """How many actions each rank can make before it must know whether the weights that they run on are final.

    That is before its first backward, or before it takes what another rank has sent after that one knew: if the weights
    were not final, that message belongs to the schedule's second start.

    Args:
        schedule: The schedule.
        rows: The actions of each rank.
    """
    points = [next((i for i, action in enumerate(row) if action.kind is not Kind.FORWARD), len(row)) for row in rows]
    places = [{action: i for i, action in enumerate(row)} for row in rows]
    changed = True
    while changed:
        changed = False
        for rank, row in enumerate(rows):
            for index, action in enumerate(row[: points[rank]]):
                if not action.stage:
                    continue
                sender = schedule.rank_of(action.stage - 1, action.microbatch)
                before = Action(Kind.FORWARD, action.stage - 1, action.microbatch)
                if sender != rank and places[sender][before] >= points[sender]:
                    points[rank], changed = index, True
                    break
    return points


def neighbours(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """Pairs of ranks that send each other messages."""
    found = {(min(pair), max(pair)) for placed in schedule.placement for pair in pairwise(placed) if pair[0] != pair[1]}
    return tuple(sorted(found))


def _step(schedule: Schedule, rank: int, action: Action, last: dict[int, Action]) -> Step:
    source = target = None
    if action.kind is Kind.FORWARD and action.stage:
        source = schedule.rank_of(action.stage - 1, action.microbatch)
    elif action.kind in GRADIENTS and action.stage + 1 < schedule.stages:
        source = schedule.rank_of(action.stage + 1, action.microbatch)
    if (message := _result(schedule, action)) is not None:
        target = schedule.rank_of(message.stage, message.microbatch)
    return Step(
        action,
        None if source == rank else source,
        None if target == rank else target,
        _adds_up(action),
        last.get(action.stage) == action,
        action.kind is Kind.INPUT_GRADIENT,
    )


def _result(schedule: Schedule, action: Action) -> Message | None:
    """What an action makes for another stage."""
    if action.kind is Kind.FORWARD and action.stage + 1 < schedule.stages:
        return Message(False, action.stage + 1, action.microbatch)
    if action.kind in GRADIENTS and action.stage:
        return Message(True, action.stage - 1, action.microbatch)
    return None


def _adds_up(action: Action) -> bool:
    return action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)

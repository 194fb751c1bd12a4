"""Can a schedule run, and does it compute everything once?"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from lightning_5d.pipeline_parallel.schedule import GRADIENTS, Action, Entry, Kind, Schedule, actions_of

Sends = Literal["buffered", "rendezvous"]
Result = tuple[str, int, int]

SHOWN = 5
"""How many problems of one sort are spelled out."""


def validate(schedule: Schedule, sends: Sends = "buffered") -> list[str]:
    """Everything that keeps a schedule from computing every gradient exactly once.

    Args:
        schedule: The schedule.
        sends: ``"buffered"``: receives are posted ahead and sends are not waited for, as the executor does it; a rank waits
            only for what an action needs. ``"rendezvous"``: a rank that computed something for another rank waits until that
            rank has come to the action that needs it, as with plain blocking sends and receives.

    Returns:
        A sentence for each problem, none for a schedule that can run. Where ranks wait in a circle, it says which action
        waits for which.
    """
    problems = _incomplete(schedule)
    # An action that is missing or on a wrong rank makes others wait for it: that wait would say nothing new.
    return problems or _deadlock(schedule, sends)


def check(schedule: Schedule, sends: Sends = "buffered") -> Schedule:
    """Returns the schedule if it can run.

    Raises:
        ValueError: With all of `validate`'s problems, if it cannot.
    """
    if problems := validate(schedule, sends):
        raise ValueError("\n  ".join((f"Schedule {schedule.name!r} cannot run:", *problems)))
    return schedule


def results_of(action: Action) -> tuple[Result, ...]:
    """What an action makes: ``("F" | "B" | "W", stage, microbatch)``; a fused backward makes both gradients."""
    kinds = ("B", "W") if action.kind is Kind.BACKWARD else (action.kind.value,)
    return tuple((kind, action.stage, action.microbatch) for kind in kinds)


def needs_of(action: Action, stages: int) -> tuple[Result, ...]:
    """The results that an action waits for, the one of its own stage first."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return (("F", stage - 1, microbatch),) if stage else ()
    if action.kind is Kind.WEIGHT_GRADIENT:
        return (("B", stage, microbatch),)
    own: Result = ("F", stage, microbatch)
    return (own, ("B", stage + 1, microbatch)) if stage + 1 < stages else (own,)


def _incomplete(schedule: Schedule) -> list[str]:
    stages, microbatches = schedule.stages, schedule.microbatches
    strangers, misplaced, mispaired = [], [], []
    made: Counter[Result] = Counter()
    for rank, row in enumerate(schedule.rows):
        for entry in row:
            if not isinstance(entry, Action):
                kinds = (entry.forward.kind, entry.backward.kind)
                if kinds[0] is not Kind.FORWARD or kinds[1] not in GRADIENTS:
                    mispaired.append(f"Rank {rank} overlaps {entry}; a pair is one F and one B or BW, in this order.")
            for action in actions_of(entry):
                if not (0 <= action.stage < stages and 0 <= action.microbatch < microbatches):
                    strangers.append(
                        f"Rank {rank} has {action}, but stages go from 0 to {stages - 1} and microbatches from 0 to {microbatches - 1}."
                    )
                    continue
                owner = schedule.rank_of(action.stage, action.microbatch)
                if owner != rank:
                    misplaced.append(
                        f"Rank {rank} has {action}, but that stage is placed on rank {owner} for this microbatch."
                    )
                made.update(results_of(action))
    missing, repeated = [], []
    for microbatch in range(microbatches):
        for stage in range(stages):
            for kind in ("F", "B", "W"):
                count = made[kind, stage, microbatch]
                rank = schedule.rank_of(stage, microbatch)
                what = f"{kind} of stage {stage}, microbatch {microbatch} (rank {rank}),"
                if count == 0:
                    also = "" if kind == "F" else ", neither alone nor in a BW"
                    missing.append(f"{what} is missing{also}.")
                elif count > 1:
                    repeated.append(f"{what} is computed {count} times; once is right.")
    return [
        line
        for sort in (strangers, mispaired, misplaced, missing, repeated)
        for line in (*sort[:SHOWN], *([f"… and {len(sort) - SHOWN} more like the last."] if len(sort) > SHOWN else []))
    ]


def _deadlock(schedule: Schedule, sends: Sends) -> list[str]:
    """Lets all ranks run, without a clock, until nobody can go on; those that are left wait in a circle."""
    walk = _Walk(schedule, sends)
    while sum(walk.advance(rank) for rank in range(schedule.ranks)):
        pass
    stuck = next((rank for rank in range(schedule.ranks) if walk.entry(rank) is not None), None)
    if stuck is None:
        return []
    waits: dict[int, _Wait] = {}
    while stuck not in waits:
        wait = walk.wait(stuck)
        if wait is None:
            raise RuntimeError(f"Rank {stuck} stands at {walk.entry(stuck)} and waits for nothing.")
        waits[stuck] = wait
        stuck = wait.peer
    circle = [str(wait) for rank, wait in waits.items() if rank in list(waits)[list(waits).index(stuck) :]]
    head = "One rank waits for itself" if len(circle) == 1 else f"{len(circle)} ranks wait for each other in a circle"
    return [f"{head}: {' '.join(circle)}"]


@dataclass(frozen=True)
class _Wait:
    """Why a rank does not go on."""

    rank: int
    action: Action
    result: Result
    peer: int
    handing_over: bool

    def __str__(self) -> str:
        kind, stage, microbatch = self.result
        result = f"{kind} of stage {stage}, microbatch {microbatch}"
        if self.handing_over:
            return f"Rank {self.rank} has computed {self.action} and waits until rank {self.peer} comes to {result}, which takes it."
        where = "comes later in its own row" if self.peer == self.rank else f"rank {self.peer} has not come to"
        return f"Rank {self.rank} waits at {self.action} for {result}, which {where}."


class _Walk:
    """All ranks of a schedule on their way through their rows."""

    def __init__(self, schedule: Schedule, sends: Sends) -> None:
        self._schedule = schedule
        self._rendezvous = sends == "rendezvous"
        self._position = [0] * schedule.ranks
        self._made: set[Result] = set()
        self._computed = [False] * schedule.ranks  # what stands at the position; it may still be waiting to be taken
        self._place = {
            result: index
            for row in schedule.rows
            for index, entry in enumerate(row)
            for action in actions_of(entry)
            for result in results_of(action)
        }

    def entry(self, rank: int) -> Entry | None:
        """Where the rank stands; nowhere when it is through."""
        row, position = self._schedule.rows[rank], self._position[rank]
        return row[position] if position < len(row) else None

    def advance(self, rank: int) -> bool:
        """Goes on until the rank has to wait; says whether it did anything."""
        moved = False
        while (entry := self.entry(rank)) is not None and self.wait(rank) is None:
            moved = True
            if self._computed[rank] or not self._rendezvous:
                self._position[rank] += 1
            self._computed[rank] = self._rendezvous and not self._computed[rank]
            self._made.update(result for action in actions_of(entry) for result in results_of(action))
        return moved

    def wait(self, rank: int) -> _Wait | None:
        """What the rank waits for now."""
        entry = self.entry(rank)
        for action in actions_of(entry) if entry is not None else ():
            for result in self._takers(action) if self._computed[rank] else needs_of(action, self._schedule.stages):
                owner = self._schedule.rank_of(result[1], result[2])
                handing_over = self._computed[rank]
                if handing_over and (owner == rank or self._position[owner] >= self._place[result]):
                    continue
                if handing_over or result not in self._made:
                    return _Wait(rank, action, result, owner, handing_over)
        return None

    def _takers(self, action: Action) -> tuple[Result, ...]:
        """What is computed from an action's result on another stage."""
        if action.kind is Kind.FORWARD and action.stage + 1 < self._schedule.stages:
            return (("F", action.stage + 1, action.microbatch),)
        if action.kind in GRADIENTS and action.stage:
            return (("B", action.stage - 1, action.microbatch),)
        return ()

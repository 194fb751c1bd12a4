"""A pipeline schedule as data: for each rank, the actions it runs, in order.

Generators make schedules, `validate` checks them, `simulate` times them, the charts draw them. None of them starts a process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property


class Kind(StrEnum):
    """What an action computes for one stage and one microbatch."""

    FORWARD = "F"
    INPUT_GRADIENT = "B"
    WEIGHT_GRADIENT = "W"
    BACKWARD = "BW"
    """Both gradients at once, as autograd computes them."""


GRADIENTS = (Kind.INPUT_GRADIENT, Kind.BACKWARD)
"""The kinds whose result the stage before waits for."""


@dataclass(frozen=True, slots=True)
class Action:
    """One computation: a kind, a stage and a microbatch, the last two counted from 0."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, microbatch {self.microbatch}"

    @property
    def cell(self) -> str:
        """Stage, kind and microbatch as a table writes them: ``2BW5``."""
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Overlap:
    """A forward and a backward of two different microbatches that a rank runs woven into each other, as DualPipe does.

    Both may start when the inputs of both are there; the results of both are there when the pair ends.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"{self.forward} with {self.backward}"

    @property
    def cell(self) -> str:
        """The two cells, joined by a plus sign."""
        return f"{self.forward.cell}+{self.backward.cell}"


Entry = Action | Overlap
Row = tuple[Entry, ...]


def actions_of(entry: Entry) -> tuple[Action, ...]:
    """The one or two actions of an entry."""
    return (entry,) if isinstance(entry, Action) else (entry.forward, entry.backward)


@dataclass(frozen=True)
class Schedule:
    """Who computes what, in which order.

    Attributes:
        name: The generator's name, or the user's.
        placement: For each copy of the parameters, the rank of each stage. There is one copy, except in a bidirectional pipeline.
        copies: For each microbatch, the copy it runs through.
        rows: For each rank, its entries in the order it runs them.

    Raises:
        ValueError: If the parts do not fit each other: a rank, copy or number of stages that does not exist. Whether the
            actions are complete and can run is `validate`'s question.
    """

    name: str
    placement: tuple[tuple[int, ...], ...]
    copies: tuple[int, ...]
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        if not (self.rows and self.copies and self.placement and self.placement[0]):
            raise ValueError(
                f"Schedule {self.name!r} has {self.ranks} ranks and {self.microbatches} microbatches; it needs one of each."
            )
        for copy, placed in enumerate(self.placement):
            if len(placed) != self.stages:
                raise ValueError(
                    f"Schedule {self.name!r}: copy {copy} has {len(placed)} stages and copy 0 has {self.stages}; all copies have the same."
                )
            if not all(0 <= rank < self.ranks for rank in placed):
                raise ValueError(
                    f"Schedule {self.name!r}: copy {copy} is placed on ranks {placed}, but ranks go from 0 to {self.ranks - 1}."
                )
        if not all(0 <= copy < len(self.placement) for copy in self.copies):
            raise ValueError(
                f"Schedule {self.name!r}: microbatches run through copies {sorted(set(self.copies))}, "
                f"but copies go from 0 to {len(self.placement) - 1}."
            )

    def __str__(self) -> str:
        width = len(str(self.ranks - 1))
        rows = (f"rank {rank:>{width}}: {' '.join(entry.cell for entry in row)}" for rank, row in enumerate(self.rows))
        return "\n".join((self.title, *rows))

    def __repr__(self) -> str:
        return f"<Schedule {self.title}>"

    @property
    def title(self) -> str:
        """Name and sizes in a line."""
        return f"{self.name}: {self.ranks} ranks, {self.stages} stages, {self.microbatches} microbatches"

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """Number of pieces that the model is cut into."""
        return len(self.placement[0])

    @property
    def microbatches(self) -> int:
        """Number of microbatches of a step."""
        return len(self.copies)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any weight gradient is computed apart from its input gradient."""
        return any(action.kind is Kind.WEIGHT_GRADIENT for row in self.rows for action in flatten(row))

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank that computes a stage for a microbatch."""
        return self.placement[self.copies[microbatch]][stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages whose parameters a rank holds, in the order of the copies and, within one, of the model."""
        return tuple(stage for placed in self.placement for stage, owner in enumerate(placed) if owner == rank)


def flatten(row: Row) -> Iterator[Action]:
    """The actions of a row in order, the forward of a pair before its backward."""
    for entry in row:
        yield from actions_of(entry)


def looped_placement(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Stages dealt out to the ranks in turn: rank r holds stages r, r + ranks, r + 2·ranks and so on."""
    return tuple(range(ranks)) * chunks


def v_placement(ranks: int) -> tuple[int, ...]:
    """Two stages per rank, down the ranks and up again: rank r holds stages r and 2·ranks - 1 - r."""
    return (*range(ranks), *reversed(range(ranks)))


def keep_microbatches(row: Row, kept: dict[int, int]) -> Row:
    """A row with only some of its microbatches, under new numbers; pairs that lose a half become plain actions.

    What is left of a schedule that can run can still run, because no microbatch depends on another.

    Args:
        row: The entries of one rank.
        kept: New number of each microbatch that stays.
    """
    entries: list[Entry] = []
    for entry in row:
        actions = [
            Action(action.kind, action.stage, kept[action.microbatch])
            for action in actions_of(entry)
            if action.microbatch in kept
        ]
        entries.extend([Overlap(*actions)] if len(actions) == 2 else actions)
    return tuple(entries)

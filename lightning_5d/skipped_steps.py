"""Optimizer steps that were tried, and those of them that were left out."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_5d.steps import ParallelSteps

LOSS_SCALE = "loss scale"
"""The reason of a step that was left out because its gradients overflowed."""


@dataclass(frozen=True)
class SkippedStep:
    """One optimizer step that was left out.

    Attributes:
        step: Its number: optimizer steps tried before it.
        reason: `LOSS_SCALE`, or what was given to `FiveD.skip_step`.
        scale: The loss scale it ran with, or ``None`` without loss scaling.
        optimizer_index: Which of the module's optimizers.
    """

    step: int
    reason: str
    scale: float | None
    optimizer_index: int


class SkippedSteps:
    """Counts optimizer steps; the same on every rank, and saved in checkpoints.

    Attributes:
        attempts: Optimizer steps tried, the skipped ones included. ``trainer.global_step`` counts the same.
        by_reason: Number of skipped steps for each reason.
        last: The last one skipped.
    """

    def __init__(self) -> None:
        self.attempts = 0
        self.by_reason: dict[str, int] = {}
        self.last: SkippedStep | None = None
        self._in_a_row: dict[int, int] = {}

    @property
    def total(self) -> int:
        """Optimizer steps skipped, for any reason."""
        return sum(self.by_reason.values())

    @property
    def in_a_row(self) -> int:
        """Steps skipped since the last one made; with several optimizers, of the one that has skipped most."""
        return max(self._in_a_row.values(), default=0)

    def made(self, optimizer_index: int = 0) -> None:
        """Counts a step that was made."""
        self.attempts += 1
        self._in_a_row[optimizer_index] = 0

    def skipped(self, reason: str, scale: float | None = None, optimizer_index: int = 0) -> None:
        """Counts a step that was left out."""
        self.last = SkippedStep(self.attempts, reason, scale, optimizer_index)
        self.attempts += 1
        self.by_reason[reason] = self.by_reason.get(reason, 0) + 1
        self._in_a_row[optimizer_index] = self._in_a_row.get(optimizer_index, 0) + 1

    def state_dict(self) -> dict[str, Any]:
        """All counts, as plain values."""
        return {
            "attempts": self.attempts,
            "by_reason": dict(self.by_reason),
            "last": None if self.last is None else asdict(self.last),
            "in_a_row": dict(self._in_a_row),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from saved counts."""
        self.attempts = int(state["attempts"])
        self.by_reason = dict(state["by_reason"])
        self.last = None if state["last"] is None else SkippedStep(**state["last"])
        self._in_a_row = {int(index): count for index, count in state["in_a_row"].items()}


@contextmanager
def holding_schedules(strategy: ParallelSteps) -> Generator[None, None, None]:
    """Step-wise learning-rate schedules do not advance where the step was left out, whatever hook the user has for them."""
    module = strategy.connected_module
    step_wise = {id(config.scheduler) for config in strategy.lr_scheduler_configs if config.interval == "step"}
    own = vars(module).get("lr_scheduler_step")
    advance = module.lr_scheduler_step

    @wraps(advance)
    def unless_skipped(scheduler: Any, metric: Any | None) -> None:
        if not (strategy.skipping and id(scheduler) in step_wise):
            advance(scheduler, metric)

    object.__setattr__(module, "lr_scheduler_step", unless_skipped)
    try:
        yield
    finally:
        object.__delattr__(module, "lr_scheduler_step")
        if own is not None:
            object.__setattr__(module, "lr_scheduler_step", own)

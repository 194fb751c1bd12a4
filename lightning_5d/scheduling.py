"""Between the strategy and an axis that runs a step as a schedule of microbatches, backward included."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_5d.parallelism import Parallelized


@dataclass(frozen=True)
class StepRun:
    """One call of a user's step, as the strategy tells an axis that runs it by its own schedule.

    Attributes:
        kind: ``"train"``, ``"validate"``, ``"sanity_check"``, ``"test"`` or ``"predict"``.
        epoch: Training's. What wants gradients may change between epochs.
        backward: Whether gradients are wanted.
        first: Whether this batch opens an accumulation window.
        last: Whether gradients are complete after it.
        keep_gradients: Whether somebody may look at the gradients of the last window before they are cleared.
        start: Where a microbatch's backward starts: called with what the step returned and with the microbatch's share of the
            batch, returns the loss and its gradient, both 0-dim.
        around_backward: Makes the context that a backward inside the step needs; ``None`` for none.
        reseed: Gives a part of the step random numbers of its own, by name.
    """

    kind: str
    epoch: int = 0
    backward: bool = False
    first: bool = False
    last: bool = False
    keep_gradients: bool = False
    start: Callable[[Any, float], tuple[Tensor, Tensor]] | None = None
    around_backward: Callable[[], AbstractContextManager[None]] | None = None
    reseed: Callable[[str], None] | None = None


def looks_at_gradients(trainer: pl.Trainer) -> bool:
    """Whether a hook may look at gradients, or keep them, between the step that follows and their clearing."""
    module: Any = trainer.lightning_module
    own: list[tuple[Any, type, str]] = [
        (module, pl.LightningModule, "optimizer_zero_grad"),
        (module, pl.LightningModule, "on_before_zero_grad"),
    ]
    own += [(callback, pl.Callback, "on_before_zero_grad") for callback in getattr(trainer, "callbacks", ())]
    return any(
        name in vars(owner) or getattr(type(owner), name) is not getattr(base, name) for owner, base, name in own
    )


class Scheduling(Parallelized):
    """An axis at work whose `call` runs the user's step for several microbatches, and their backwards with it.

    Lightning runs `training_step`, clears gradients, and then runs backward. Here gradients exist after the first of the
    three: they are set aside before they would be cleared, and `give_gradients` brings them back where backward would have
    made them.
    """

    @abstractmethod
    def begin_step(self, run: StepRun) -> None:
        """Comes before each `call`."""

    @abstractmethod
    def give_gradients(self) -> list[float | None]:
        """Puts the gradients of the last training step in their place; returns the weights of its microbatches."""

    def first_weights_agree(self) -> bool:
        """Whether one rank of each data rank sees all microbatches' weights, so that the first can set their common size."""
        return True

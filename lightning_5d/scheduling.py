"""Between the strategy and an axis that runs a step as a schedule of microbatches, backward included."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import lightning.pytorch as pl
import torch.distributed as dist
from torch import Tensor, nn

from lightning_5d.parallelism import Parallelized

if TYPE_CHECKING:
    from lightning_5d.strategy import FiveD


class StepHook(Protocol):
    """A step hook of an optimizer that changes buffers of modules and nothing else, so that a step can be taken back with it."""

    def changed(self) -> Iterable[nn.Module]:
        """The modules whose own buffers it may change, or has counted in."""


class PendingStep(ABC):
    """An optimizer step that was made before it was known whether it had to be clipped or left out."""

    @abstractmethod
    def stands(self) -> bool:
        """Waits for the verdict; the same on all ranks."""

    @abstractmethod
    def redo(self) -> None:
        """Takes the step back and makes it as it should have been, inside of a step of the user."""


class PostValidation(ABC):
    """Steps of the optimizer that do not wait for all stages; what the strategy asks the axis that brings them.

    Attributes:
        optimistic: Whether the present optimizer step is made before all is known.
    """

    optimistic: bool = False

    @abstractmethod
    def train(self, trainer: pl.Trainer, host_group: dist.ProcessGroup) -> AbstractContextManager[None]:
        """A context around training.

        Args:
            trainer: The Trainer.
            host_group: All ranks, on a backend for the host.
        """

    @abstractmethod
    def begin(self, optimizer: Any) -> None:
        """Comes before each optimizer step, and decides whether it is optimistic."""

    @abstractmethod
    def overflow(self, found: bool) -> bool:
        """Of an optimistic step: whether gradients of this stage are not finite on any of its ranks."""

    @abstractmethod
    def norm(self, parameters: Sequence[Tensor], bound: float) -> Tensor:
        """Of an optimistic step: the norm of the gradients of all stages up to this one."""

    @abstractmethod
    def before_step(self) -> None:
        """Of an optimistic step: comes right before parameters change."""

    @abstractmethod
    def after_step(self) -> None:
        """Comes after each optimizer step and after it was counted."""

    @property
    @abstractmethod
    def pending(self) -> PendingStep | None:
        """The last step, while its verdict has not been read."""

    @abstractmethod
    def settle(self) -> None:
        """Makes the last step final; all ranks call it together."""

    @abstractmethod
    def drop(self) -> None:
        """Forgets the last step's verdict, without waiting for anyone."""


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
        pending: The last optimizer step, if it may have to be made again.
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
    pending: PendingStep | None = None


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

    def post_validation(self, strategy: FiveD) -> PostValidation | None:
        """How optimizer steps are made without waiting for all stages; ``None`` if they wait."""
        return None

    def first_weights_agree(self) -> bool:
        """Whether one rank of each data rank sees all microbatches' weights, so that the first can set their common size."""
        return True

"""What takes the place of modules that belong to other stages."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_5d.absent import Absent, stand_in
from lightning_5d.pipeline_parallel.stage.layout import Place
from lightning_5d.pipeline_parallel.stage.placeholders import placeholder
from lightning_5d.pipeline_parallel.stage.run import Run


class Runs(Protocol):
    """Who runs stages."""

    running: Run | None
    """The run that is going on."""
    optimizing: bool
    """Whether optimizers are being made."""
    device: torch.device
    """Where weights are."""


class AbsentModule(Absent):
    """A module of another stage.

    Attributes:
        place: Where it is.
        stages: The stages that hold it.
        runs: Who runs stages here; nobody where this is a copy.
    """

    place: Place
    stages: tuple[int, ...]
    runs: Runs | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module would have returned, as far as that matters to the stage that is running.

        Raises:
            MisconfigurationException: Outside of a run, or where the model runs its modules in an order that cannot be cut.
        """
        run = None if self.runs is None else self.runs.running
        if run is None:
            raise MisconfigurationException(
                f"{self.reason()} A model that is cut into stages runs only inside of training_step, validation_step, test_step"
                " and predict_step, where all ranks take part: use trainer.validate, trainer.test or trainer.predict."
            )
        if self.name != self.place.name:
            raise MisconfigurationException(self.reason())
        if self.place.block is not None:
            return run.block(self.place.block, args, kwargs)
        return run.other(self.place)

    def received(self) -> Any:
        """What the stage that is running has got from the one before."""
        run = None if self.runs is None else self.runs.running
        return None if run is None else run.received

    def lost(self, attribute: str, like: Tensor) -> Tensor:
        """A weight without values: a step may look at its dtype, device or shape.

        While optimizers are made it is a parameter without elements, see `is_placeholder`.

        Raises:
            AttributeError: Outside of both.
        """
        run = None if self.runs is None else self.runs.running
        if run is None:
            if self.runs is not None and self.runs.optimizing and like.is_floating_point():
                return placeholder(self.runs.device, like.dtype)
            raise AttributeError(self.reason(attribute))
        return run.weight(f"{self.name}.{attribute}", like)

    def reason(self, attribute: str | None = None) -> str:
        """Why it cannot be used."""
        stages = f"stage{'s' * (len(self.stages) > 1)} {' and '.join(map(str, self.stages))}"
        where = f"{self.name} belongs to {stages} of the pipeline, and this rank holds nothing of it."
        if attribute is None:
            return where
        return f"{where} So it has no {self.name}.{attribute}."

    def __reduce__(self) -> Any:
        # Its class was made for it, and has no name to be found by.
        return _again, ({**self.__dict__, "runs": None},)

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentModule:
        new = super().__deepcopy__(memo)
        new.__dict__["runs"] = None
        return new


def stub(place: Place, module: nn.Module, stages: tuple[int, ...], runs: Runs) -> AbsentModule:
    """A stand-in for the module at a place.

    Args:
        place: The place.
        module: The module there.
        stages: The stages that hold it.
        runs: Who runs stages here.
    """
    return stand_in(AbsentModule, module, place.name, place=place, stages=stages, runs=runs)


def _again(state: dict[str, Any]) -> AbsentModule:
    new = AbsentModule()
    new.__dict__.update(state)
    return new

"""A Lightning strategy whose checkpoints are those of a one-process run."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_5d.checkpoint.forms import Forms
from lightning_5d.checkpoint.full_state import (
    gather,
    like_mapping,
    place_module_state,
    place_optimizer_state,
    with_plain_names,
)
from lightning_5d.checkpoint.plain import plain_containers
from lightning_5d.checkpoint.stages import Stages
from lightning_5d.communication import gather_ranks
from lightning_5d.parallelism import Parallelized


class WholeCheckpoints(ParallelStrategy, ABC):
    """Saves whole tensors under plain names, and cuts them to this rank's shards when it loads.

    Attributes:
        parallelized: The axes at work on the connected module.
    """

    parallelized: list[Parallelized]

    @property
    def connected_module(self) -> pl.LightningModule:
        """The LightningModule of the present run.

        Raises:
            RuntimeError: If no run has begun.
        """
        if self.lightning_module is None:
            raise RuntimeError("No LightningModule is connected to this strategy yet.")
        return self.lightning_module

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def settle_step(self) -> None:
        """Makes the last optimizer step final, where that may still have to come."""

    @property
    def forms(self) -> Forms:
        """Those weights that are not stored as they are in a checkpoint."""
        return Forms({name: form for axis in self.parallelized for name, form in axis.stored_forms().items()})

    @property
    def stages(self) -> Stages | None:
        """What joins the state of ranks that hold different stages of the module; ``None`` where each rank holds all of it."""
        return next((found for applied in self.parallelized if (found := applied.stages()) is not None), None)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.settle_step()
        gather_ranks("save_checkpoint")
        named = with_plain_names(self.connected_module.state_dict())
        named = like_mapping(named, self.forms.marked(named))
        if self.stages is not None:
            whole = self.stages.module_state(named, keep=self.is_global_zero)
            return like_mapping(named, whole)  # type: ignore[no-any-return]
        state: dict[str, Any] = gather(named, keep=self.is_global_zero)
        return state

    def by_parameter(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors by parameter name on rank 0 (meta tensors elsewhere), of all stages; every rank calls it.

        Args:
            values: Parameters, gradients or the like, by parameter name as this rank's module has it.
        """
        marked = self.forms.marked(values)
        if self.stages is not None:
            return self.stages.by_parameter(marked, keep=self.is_global_zero)
        found: dict[str, Tensor] = gather(marked, keep=self.is_global_zero)
        return found

    def full_state_dict(self) -> dict[str, Any]:
        """The module's state as plain CPU tensors on rank 0 (meta tensors elsewhere); every rank calls it."""
        return self.lightning_module_state_dict()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.settle_step()
        module, state = self.connected_module, checkpoint["state_dict"]
        if self.stages is not None:
            missing, unexpected = self.stages.missing_and_unexpected(state, module)
            if strict and missing:
                raise RuntimeError(_does_not_fit(module, missing, unexpected))  # all ranks say the same
            state = self.stages.own_module_state(state, module)
        module.load_state_dict(place_module_state(state, module, self.forms), strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.settle_step()
        inner = unwrapped(optimizer)
        marked = self.forms.marked_state(inner, self.connected_module)
        if self.stages is not None:
            return self.stages.optimizer_state(marked, inner, self.connected_module, keep=self.is_global_zero)
        state: dict[str, Any] = gather(marked, keep=self.is_global_zero)
        return state

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        if "lr_schedulers" in checkpoint:
            checkpoint = {**checkpoint, "lr_schedulers": self._scheduler_states(checkpoint["lr_schedulers"], own=False)}
        super().save_checkpoint(plain_containers(checkpoint), filepath, storage_options)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        forms = self.forms.by_parameter(self.connected_module)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if self.stages is not None:
                state = self.stages.own_optimizer_state(state, optimizer, self.connected_module, forms)
            optimizer.load_state_dict(place_optimizer_state(state, optimizer, forms))
        if self.stages is not None and isinstance(checkpoint, dict):
            # Lightning reads the schedules' states from it next.
            checkpoint["lr_schedulers"] = self._scheduler_states(checkpoint["lr_schedulers"], own=True)

    def _scheduler_states(self, states: Sequence[Any], *, own: bool) -> list[Any]:
        """The states of the learning-rate schedules of the whole module, or this rank's of them."""
        stages, module = self.stages, self.connected_module
        if stages is None:
            return list(states)
        change = stages.own_scheduler_state if own else stages.scheduler_state
        return [
            change(state, config.scheduler.optimizer, module)
            for state, config in zip(states, self.lr_scheduler_configs, strict=True)
        ]


def _does_not_fit(module: nn.Module, missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """What torch says in `load_state_dict`."""
    listed = {"Unexpected": unexpected, "Missing": missing}
    lines = [f"{what} key(s) in state_dict: {', '.join(map(repr, keys))}. " for what, keys in listed.items() if keys]
    return "\n\t".join([f"Error(s) in loading state_dict for {type(module).__name__}:", *lines])


def unwrapped(optimizer: Any) -> Any:
    """The user's optimizer inside a `LightningOptimizer`."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer

"""A Lightning strategy whose checkpoints are those of a one-process run."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_5d.checkpoint.full_state import gather, place_module_state, place_optimizer_state, with_plain_names
from lightning_5d.checkpoint.plain import plain_containers
from lightning_5d.communication import gather_ranks


class WholeCheckpoints(ParallelStrategy, ABC):
    """Saves whole tensors under plain names, and cuts them to this rank's shards when it loads."""

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

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.settle_step()
        gather_ranks("save_checkpoint")
        named = with_plain_names(self.connected_module.state_dict())
        state: dict[str, Any] = gather(named, keep=self.is_global_zero)
        return state

    def full_state_dict(self) -> dict[str, Any]:
        """The module's state as plain CPU tensors on rank 0 (meta tensors elsewhere); every rank calls it."""
        return self.lightning_module_state_dict()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.connected_module
        self.settle_step()
        module.load_state_dict(place_module_state(checkpoint["state_dict"], module), strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.settle_step()
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        state: dict[str, Any] = gather(inner.state_dict(), keep=self.is_global_zero)
        return state

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        super().save_checkpoint(plain_containers(checkpoint), filepath, storage_options)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(place_optimizer_state(state, optimizer))

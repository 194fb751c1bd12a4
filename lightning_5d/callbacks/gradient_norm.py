"""The size of the gradient before it is clipped."""

from __future__ import annotations

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_5d.strategy import FiveD


class GradientNorm(L.Callback):
    """Logs `gradient_norm`, the 2-norm over all parameters of the model, before each optimizer step and its clipping."""

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Compute and log it."""
        pl_module.log("gradient_norm", gradient_norm(trainer, pl_module), prog_bar=True)


def gradient_norm(trainer: L.Trainer, module: torch.nn.Module) -> Tensor:
    """The 2-norm over all gradients, the same on every rank; every rank calls it."""
    if isinstance(trainer.strategy, FiveD):
        return trainer.strategy.gradient_norm()
    return torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])

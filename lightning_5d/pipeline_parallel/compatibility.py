"""What would train to other numbers on stages than in one process, or fail in words of torch's: named before training."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch.callbacks import BackboneFinetuning, StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.optim import LBFGS, Optimizer

from lightning_5d.parallelism import Problem

_CALLBACKS: tuple[tuple[type, str, str], ...] = (
    (WeightAveraging, "copies the whole module before it is cut", "Average the weights of saved checkpoints"),
    (StochasticWeightAveraging, "copies the whole module before it is cut", "Average the weights of saved checkpoints"),
    (
        BackboneFinetuning,
        "puts weights that a rank does not hold in param groups during the run",
        "Give the optimizer all weights, and freeze and unfreeze them in on_train_epoch_start",
    ),
)


def split_optimizer_problems(optimizers: Iterable[Optimizer]) -> list[Problem]:
    """Optimizers whose step needs the gradients of all stages together."""
    return [
        Problem(
            f"{type(optimizer).__name__} works on all gradients as one vector, and each stage has only its own.",
            "Use another optimizer, or no pipeline.",
        )
        for optimizer in optimizers
        if isinstance(optimizer, LBFGS)
    ]


def callback_problems(module: nn.Module) -> list[Problem]:
    """Callbacks of the module's Trainer that need the weights of all stages on every rank."""
    callbacks = getattr(getattr(module, "_trainer", None), "callbacks", ())
    return [
        Problem(
            f"{type(callback).__name__} {why}; a stage holds only its own weights.", f"{instead}, or use no pipeline."
        )
        for callback in callbacks
        for kind, why, instead in _CALLBACKS
        if isinstance(callback, kind)
    ]

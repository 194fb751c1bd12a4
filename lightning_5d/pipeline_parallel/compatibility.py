"""What would train to other numbers on stages than in one process, or fail in words of torch's: named before training."""

from __future__ import annotations

from collections.abc import Iterable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import LBFGS, Optimizer

from lightning_5d.parallelism import Problem

_CALLBACKS: tuple[tuple[type, str, str], ...] = (
    (WeightAveraging, "copies the whole module before it is cut", "Average the weights of saved checkpoints"),
    (StochasticWeightAveraging, "copies the whole module before it is cut", "Average the weights of saved checkpoints"),
    (
        BaseFinetuning,
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


def warn_of_differences(module: pl.LightningModule, microbatches: int) -> None:
    """Says what of a module is another computation in microbatches, or on a stage alone."""
    norms = sorted({type(inner).__name__ for inner in module.modules() if isinstance(inner, _BatchNorm)})
    if norms and microbatches > 1:
        rank_zero_warn(
            f"{', '.join(norms)} takes its statistics from each of {microbatches} microbatches, not from the whole batch, so numbers"
            " differ from those of one process. Normalise otherwise (LayerNorm, GroupNorm), or use microbatches=1."
        )
    if is_overridden("configure_gradient_clipping", module):
        rank_zero_warn(
            "Each rank of a pipeline holds its own stages' gradients. In configure_gradient_clipping call self.clip_gradients, functions of"
            " torch.nn.utils or trainer.strategy.gradient_norm(), on all ranks: a norm put together by hand would be one stage's."
        )

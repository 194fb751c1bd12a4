"""Trainers for tests: quiet, on CPU, nothing written unless asked for."""

from typing import Any

import lightning as L
import torch

from lightning_5d import FiveD, ZeRO


def quiet(**arguments: Any) -> L.Trainer:
    """A Trainer without bars, logs, checkpoints and summaries."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
    }
    return L.Trainer(**{**defaults, **arguments})


def zero(stage: int, ranks: int, replicate: int = 1, **arguments: Any) -> L.Trainer:
    """A quiet Trainer under one ZeRO stage, inside a rank of a pool."""
    return quiet(strategy=FiveD(ZeRO(stage=stage, replicate=replicate)), devices=ranks, **arguments)


def whole(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Full copies of a module's parameters; every rank calls it."""
    from lightning_5d.checkpoint.full_state import gather

    return {name: tensor.clone() for name, tensor in gather(dict(module.named_parameters()), keep=True).items()}


def plain(metrics: dict[str, torch.Tensor]) -> dict[str, float]:
    """Metrics as floats, to travel between processes."""
    return {name: float(value) for name, value in metrics.items()}

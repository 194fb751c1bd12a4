"""Runs under the profiler, as rank functions."""

from pathlib import Path
from typing import Any

import torch

from lightning_5d.callbacks import MemoryProfiler
from tests.modules import TinyLM, loader
from tests.trainers import zero


def profiled(rank: int, stage: int, ranks: int, folder: str, **arguments: Any) -> None:
    """A few steps of a small model; everything is in the files."""
    torch.manual_seed(0)
    profiler = MemoryProfiler(folder, steps=2)
    trainer = zero(stage, ranks, callbacks=[profiler], max_steps=3, limit_val_batches=0, **arguments)
    trainer.fit(TinyLM(layers=3, width=32), loader(32, batch_size=4))
    assert all(Path(file).exists() for file in profiler.files)

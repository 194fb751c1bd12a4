"""What `MemoryProfiler` costs a step: outside its window, and inside.

    python benchmarks/memory_overhead.py [--rounds 4]

One process, one thread, the small decoder of the other benchmarks. Contestants take turns; a step's time is the median of
a run, a ratio the median over rounds of the contestant's time over that of the same round without the callback.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lightning_5d.callbacks import MemoryProfiler
from lightning_5d.models import DecoderConfig
from lightning_5d.models.decoder import Decoder

STEPS, RECORDED = 24, 4


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder(DecoderConfig.preset("demo", context_length=64))
        self.ends: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.ends.append(time.perf_counter())
        return F.cross_entropy(self.decoder(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def step_times(profile: bool) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [MemoryProfiler(folder, steps=RECORDED, pictures=False)] if profile else []
        trainer = L.Trainer(
            accelerator="cpu", max_steps=STEPS, callbacks=callbacks, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        model = Model()
        trainer.fit(model, DataLoader(torch.randint(256, (4 * STEPS, 65)), batch_size=4))
    return [b - a for a, b in pairwise(model.ends)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    outside, inside, plain = [], [], []
    step_times(False)
    for _ in range(parser.parse_args().rounds):
        without, with_profiler = step_times(False), step_times(True)
        own = statistics.median(without[RECORDED + 1 :])
        plain.append(own)
        outside.append(statistics.median(with_profiler[RECORDED + 1 :]) / own)
        inside.append(statistics.median(with_profiler[1 : RECORDED - 1]) / own)
    print(f"a step without: {statistics.median(plain) * 1e3:.1f} ms")
    print(
        f"outside the window: {statistics.median(outside):.3f} of that ({', '.join(f'{ratio:.3f}' for ratio in outside)})"
    )
    print(
        f"inside the window:  {statistics.median(inside):.2f} of that ({', '.join(f'{ratio:.2f}' for ratio in inside)})"
    )


if __name__ == "__main__":
    main()

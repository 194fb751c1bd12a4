"""Random numbers of steps: a function of the run's seed, the data rank and the place in the run.

Data ranks, microbatches and steps draw different numbers (dropout masks, noise), and ranks that hold the same batch draw the
same ones. Nothing has to be saved: a resumed run goes on with the numbers of one without a break, under any number of ranks,
and an evaluation in between changes none of them. Only the generators of torch are set, and only while a step runs; everything
else, samplers among it, keeps the stream that is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from lightning_5d.initialization import module_seed, run_seed, seed_generators
from lightning_5d.mesh import DATA_AXES, ParallelMesh

if TYPE_CHECKING:
    import lightning.pytorch as pl


@contextmanager
def step_stream(
    trainer: pl.Trainer, mesh: ParallelMesh, device: torch.device, indices: Sequence[int]
) -> Generator[Callable[[str], None], None, None]:
    """A context in which torch draws the numbers of one step of this data rank.

    Gives a function that begins the stream of a part of the step, by name; for a step that runs in parts.

    Args:
        trainer: Knows what kind of step this is, and its number in the whole run for training.
        mesh: The ranks by axis.
        device: The device whose generator is set besides the CPU's.
        indices: Batch and dataloader index, for evaluation, whose numbers are then the same each time.
    """
    stage = trainer.state.stage
    number = trainer.fit_loop.epoch_loop.total_batch_idx if trainer.training else "/".join(map(str, indices))
    seed = module_seed(run_seed(), f"step/{stage.value if stage else ''}/{mesh.rank(*DATA_AXES)}/{number}")
    accelerated = device.type != "cpu"
    with torch.random.fork_rng(
        devices=[device.index or 0] if accelerated else [], device_type=device.type if accelerated else "cuda"
    ):
        seed_generators(seed, device)
        yield partial(_begin_part, seed, device)


def _begin_part(seed: int, device: torch.device, name: str) -> None:
    seed_generators(module_seed(seed, name), device)

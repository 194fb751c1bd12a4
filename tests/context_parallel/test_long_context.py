"""The recipe of long sequences: one rank of four beside one process."""

import os
from pathlib import Path

import pytest

from lightning_5d.memory.beside import RecordedRun
from tests.ranks.warm_job import run_warm_job

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "model.decoder.hidden_size=48", "model.decoder.intermediate_size=96", "model.decoder.context_length=1024",
    "trainer.max_steps=3", "trainer.limit_val_batches=0", "callbacks.summary=null", "callbacks.checkpoint=null",
    "callbacks.loss_plot=null", "callbacks.text_sample=null", "+callbacks.memory.pictures=false",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_each_of_four_ranks_keeps_a_quarter_of_the_activations_of_one_process(tmp_path):
    runs = {}
    for size in (1, 4):
        folder = tmp_path / str(size)
        status, output = run_warm_job(
            size, "-m", "lightning_5d.cli", "train", "recipe=long_context", f"context.size={size}", *SMALL,
            f"hydra.run.dir={folder}", folder=ROOT, environment=os.environ, seconds=150,
        )  # fmt: skip
        assert status == 0, output
        runs[size] = RecordedRun.load(folder / "memory")
    (alone,) = runs[1].ranks
    whole = alone.at_end("forward", 3)["activations"]
    kept = [record.at_end("forward", 3)["activations"] for record in runs[4].ranks]
    assert len(kept) == 4
    assert max(kept) < 1.02 * min(kept)
    # Keys and values of its own tokens lie in memory that the others read, and do not count as activations.
    assert 0.22 * whole < max(kept) < 0.26 * whole

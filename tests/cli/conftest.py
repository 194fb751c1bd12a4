import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.warm import run_warm

FROM_A_SHELL = ("-m", "lightning_5d.cli")
REPOSITORY = Path(__file__).parents[2]
TINY = [
    "model=tiny", "trainer.max_steps=4", "trainer.val_check_interval=2", "trainer.log_every_n_steps=1",
    "callbacks.text_sample.tokens=20", "callbacks.summary=null", "trainer.limit_val_batches=4",
]  # fmt: skip
RECORDER = [
    "+callbacks.recorder._target_=tests.cli.recorder.Recorder",
    "+callbacks.recorder.folder=${output_dir}/ranks",
]
LAUNCHER_VARIABLES = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED")


@pytest.fixture
def environment():
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return kept | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


@pytest.fixture
def fived(tmp_path, environment):
    """Run `fived` in an empty folder; gives status, output and errors as one text.

    In a warm process, or with `launcher`, the words between `python` and the arguments, in a cold one.
    """

    def run(*arguments, launcher=None, timeout=300, cwd=tmp_path):
        if launcher is None:
            return run_warm("-m", "lightning_5d.cli", *arguments, folder=cwd, environment=environment, seconds=timeout)
        done = subprocess.run(
            [sys.executable, *launcher, *arguments], cwd=cwd, env=environment, timeout=timeout,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        return done.returncode, done.stdout

    return run


def ranks_of(run_folder):
    """What the `Recorder` of each rank wrote, by rank."""
    facts = [json.loads(file.read_text()) for file in (run_folder / "ranks").glob("*.json")]
    return sorted(facts, key=lambda fact: fact["rank"])

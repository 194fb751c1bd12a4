"""One job: a resolved configuration, run by one or more processes that share it.

Lightning starts the other ranks of a run by repeating the command line. Repeating Hydra's would compose everything a
second time: a sweep would start over in each of them, a time in a path would differ. So the first rank writes the
resolved configuration once and, while the job runs, the command line to repeat is `fived worker THAT_FILE`.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf

CONFIG_NAME = "job.yaml"


def run_job(command: str, config: DictConfig) -> Any:
    """Run `command` with `config` on the first rank, or on a rank that torchrun or Slurm started."""
    resolved = OmegaConf.create({"command": command, "config": OmegaConf.to_container(config, resolve=True)})
    path = Path(resolved.config.output_dir).absolute() / CONFIG_NAME
    if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
        path.parent.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(resolved, path)
    with _as_it_was(), _repeated_as("worker", str(path), "--cwd", os.getcwd()):
        return _run(resolved)


def run_worker(path: Path, cwd: Path) -> Any:
    """Run the job of `path` on another rank, in the folder the first one works in."""
    os.chdir(cwd)
    job = OmegaConf.load(path)
    if not isinstance(job, DictConfig):
        raise ValueError(f"{path} does not describe a job.")
    return _run(job)


def _run(job: DictConfig) -> Any:
    from lightning_5d.cli.configured import COMMANDS

    # Lightning 2.6.6 asks torch 2.13 in a way that torch will drop; a person who trains can do nothing about it.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    return COMMANDS[job.command](job.config)


@contextmanager
def _repeated_as(*arguments: str) -> Iterator[None]:
    before = sys.argv
    sys.argv = [before[0], *arguments]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Leave no process group and no environment variable to the next job of a sweep."""
    before = dict(os.environ)
    had_group = dist.is_initialized()
    try:
        yield
    finally:
        if dist.is_initialized() and not had_group:
            dist.destroy_process_group()
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)

"""The sub-commands that Hydra configures: where the configuration lies, and the name of a run's folder."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

import lightning_5d
from lightning_5d.cli.job import run_job
from lightning_5d.cli.train import train
from lightning_5d.cli.verify import verify

COMMANDS: Mapping[str, Callable[[DictConfig], Any]] = {"train": train, "verify": verify}


def configuration_folder() -> Path:
    """`conf/`: inside the package when it was installed from a wheel, beside it in a checkout.

    Raises:
        FileNotFoundError: If it is in neither place.
    """
    package = Path(lightning_5d.__file__).resolve().parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "train.yaml").is_file():
            return folder
    raise FileNotFoundError(
        f"There is no conf/train.yaml in {package} or {package.parent}; install lightning-5d again."
    )


def run_configured(command: str) -> int:
    """Let Hydra read the rest of the command line, and run the jobs it makes of it."""
    OmegaConf.register_new_resolver("fived_run_name", lambda: run_name(os.environ), use_cache=True, replace=True)
    status = 0

    @hydra.main(version_base="1.3", config_path=str(configuration_folder()), config_name="train")
    def jobs(config: DictConfig) -> Any:
        nonlocal status
        result = run_job(command, config)
        if command == "verify" and result is False:
            status = 1
        return result

    # Hydra takes everything after the program's name for itself.
    program, arguments = sys.argv[0], sys.argv[2:]
    sys.argv = [program, *_with_overrides(arguments, [f"hydra/help={command}", *_quiet_rank(os.environ)])]
    jobs()
    return status


def _with_overrides(arguments: Sequence[str], more: Sequence[str]) -> list[str]:
    """Puts overrides before the user's own, so that the user's win.

    All of them have to stand together: Hydra reads a second group of them, behind an option such as ``--cfg job``, as a mistake.
    """
    first = next((i for i, word in enumerate(arguments) if "=" in word and not word.startswith("-")), 0)
    return [*arguments[:first], *more, *arguments[first:]]


def run_name(environ: Mapping[str, str]) -> str:
    """A name for the folder of a run that all its ranks agree on, and no other run has.

    Ranks that Slurm started share the number of their step. Ranks that torchrun started ask its store for the name that
    the first of them chose. Otherwise this process is the only one so far: the time and its number.
    """
    if "SLURM_PROCID" in environ and "SLURM_JOB_ID" in environ:
        return f"slurm-{environ['SLURM_JOB_ID']}-{environ.get('SLURM_STEP_ID', '0')}"
    name = time.strftime("%Y-%m-%d/%H-%M-%S-") + str(os.getpid())
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _agreed_with_torchrun(name, environ)
    return name


def _agreed_with_torchrun(name: str, environ: Mapping[str, str]) -> str:
    from torch.distributed import TCPStore

    store = TCPStore(
        environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=60)
    )
    key = f"lightning_5d/run_name/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if environ["RANK"] == "0":
        store.set(key, name)
    agreed: bytes = store.get(key)
    return agreed.decode()


def _quiet_rank(environ: Mapping[str, str]) -> list[str]:
    """Overrides that keep a rank other than the first from writing Hydra's files, when something else started it."""
    rank = environ.get("RANK", environ.get("SLURM_PROCID", "0"))
    return [] if rank == "0" else ["hydra.output_subdir=null", "hydra/job_logging=none"]

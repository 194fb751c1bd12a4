"""Starts the ranks of a job as torchrun would, each in a process that has imported already."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.ranks.environment import as_torchrun
from tests.ranks.pool import open_store
from tests.ranks.warm import WarmProcess, start_warm


def run_warm_job(
    ranks: int, *arguments: str, folder: Path, environment: Mapping[str, str], seconds: float
) -> tuple[int, str]:
    """The first exit code that is not 0, and output and errors of all ranks as one text; the time limit ends them.

    For what a program does, where how it starts its ranks is none of the claim: a cold one imports for seconds.
    """
    store = open_store()
    limit = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="warm-") as place:
        files = [Path(place) / f"{rank}.log" for rank in range(ranks)]
        processes: list[WarmProcess] = []
        try:
            for rank, file in enumerate(files):
                variables = {**environment, **as_torchrun(rank, ranks, store.port)}
                processes.append(start_warm(*arguments, folder=folder, environment=variables, out=file))
            codes = [process.wait(max(0.0, limit - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end after {seconds} s\n{_written(files)}") from None
        finally:
            for process in processes:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
        return next(filter(None, codes), 0), _written(files)


def _written(files: list[Path]) -> str:
    return "\n".join(file.read_text(errors="replace") for file in files if file.exists())

"""The state of a process that a test may change and the next test must not see."""

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy
import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_5d.communication import destroy_process_groups

SEED = 0
HELD_GRACE_SECONDS = 2.0
LEFTOVER_GRACE_SECONDS = 6.0
HELD_GROUPS = "process groups that something still holds"
"""Said of a call whose groups live on, with a thread each that wakes a hundred times a second: its process has to go."""
# Processes that serve the rest of the process's life by design.
SERVICES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "compile_worker")


class ProcessState:
    """A snapshot taken before the first call, put back after every call."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._folder = os.getcwd()
        self._handlers = _handlers()
        self._filters = list(warnings.filters)
        self._lightning_rank = getattr(rank_zero_only, "rank", None)
        self._threads = set(threading.enumerate())

    def restore(self) -> None:
        """Put everything back, the process groups first: what is left of a failed call hangs on them."""
        destroy_process_groups()
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._folder)
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        warnings.filters[:] = self._filters  # type: ignore[index]
        warnings._filters_mutated_lock_held() if hasattr(
            warnings, "_filters_mutated_lock_held"
        ) else warnings._filters_mutated()  # type: ignore[attr-defined]
        if self._lightning_rank is None:
            with contextlib.suppress(AttributeError):
                del rank_zero_only.rank
        else:
            rank_zero_only.rank = self._lightning_rank
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
        torch.set_float32_matmul_precision("highest")
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        self.seed()
        gc.collect()

    @staticmethod
    def seed() -> None:
        """The same random numbers at the start of every call, whatever ran before."""
        random.seed(SEED)
        numpy.random.seed(SEED)
        torch.manual_seed(SEED)

    def leftovers(self) -> list[str]:
        """Threads that keep a process alive, child processes and process groups that a call started and did not end."""
        start = time.monotonic()
        while True:
            found = [
                f"thread {thread.name!r}"
                for thread in threading.enumerate()
                if thread not in self._threads and not thread.daemon and thread.is_alive()
            ] + [f"process {pid} ({command})" for pid, command in _children()]
            if event_loops():
                gc.collect()  # what the last collection has finalized, or a thread that has ended since, may have held more
                found.append(HELD_GROUPS)
            if not found:
                # What has stayed (modules, caches) is not looked at again: that took a tenth of all time.
                gc.freeze()
            # Groups that live on are no failure; what is one has time to end on busy cores.
            grace = HELD_GRACE_SECONDS if found == [HELD_GROUPS] else LEFTOVER_GRACE_SECONDS
            if not found or time.monotonic() > start + grace:
                return found
            time.sleep(0.02)


def _handlers() -> dict[int, Any]:
    fixed = {signal.SIGKILL, signal.SIGSTOP}
    found = {number: signal.getsignal(number) for number in signal.valid_signals() - fixed}
    # None: installed by C code, which Python cannot put back.
    return {number: handler for number, handler in found.items() if handler is not None}


def event_loops() -> int:
    """How many of gloo's event loops run: one for each process group, whether it is used or not."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            count += (task / "comm").read_text() == "gloo_tcp_loop\n"
    return count


def _children() -> list[tuple[int, str]]:
    found = []
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in task.read_text().split():
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                # An empty command line is a zombie: it has ended, only nobody has read its exit code.
                if command and not any(service in command for service in SERVICES):
                    found.append((int(pid), command.strip()[:80]))
    return found

"""Starts training jobs in processes of their own and finds what they leave behind."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning_5d.launch.in_process import _PRELOAD
from tests.ranks.warm import WarmProcess, start_warm

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PYTHON = (sys.executable,)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
STACKS_SECONDS = 10.0
"""How long a process may take to write them; one that is frozen never does."""
LAUNCH_NAMES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK")


@dataclass
class Running:
    """A job that has been started; its processes are of one session or carry `tag` in their environment."""

    process: subprocess.Popen[str] | WarmProcess
    tag: str
    out: Path
    err: Path

    def wait(self, seconds: float) -> "Finished":
        """Wait, and fail when the job takes longer."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            alive = self.where()
            self.kill()
            raise AssertionError(
                f"no end after {seconds} s\n{self.out.read_text()}\n{self.err.read_text()}\n{alive}"
            ) from None
        done = Finished(code, self.out.read_text(), self.err.read_text(), self, time.monotonic())
        # pytest shows this when the test fails later on.
        print(f"--- a job ended with {code} and printed\n{done.out}\n--- its errors\n{done.err}")
        return done

    def wait_for(self, text: str, times: int, seconds: float) -> None:
        """Wait until the job has printed `text` so often."""
        limit = time.monotonic() + seconds
        while True:
            over = time.monotonic() > limit or self.process.poll() is not None
            if self.out.read_text().count(text) >= times:
                return
            if over:
                self.kill()
                raise AssertionError(f"{text!r} did not come\n{self.out.read_text()}\n{self.err.read_text()}")
            time.sleep(0.05)

    def processes(self) -> list[int]:
        """The live processes of this job."""
        mark = f"JOB_TAG={self.tag}".encode()
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    state, _, _, session = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:4]
                    if state != "Z" and (
                        int(session) == self.process.pid or mark in (folder / "environ").read_bytes().split(b"\0")
                    ):
                        found.append(int(folder.name))
                except (FileNotFoundError, ProcessLookupError, PermissionError):
                    continue
        return found

    def left_after(self, seconds: float) -> list[int]:
        """The processes still alive `seconds` from now; returns early when there are none."""
        limit = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < limit:
            time.sleep(0.1)
        if left:
            print(f"--- left of a job\n{self.where()}\n{self.err.read_text()}")
        return left

    def where(self) -> str:
        """What each live process waits for; those that run `job.py` write the stacks of all their threads to `err`."""
        lines = []
        for pid in self.processes():
            folder = Path(f"/proc/{pid}")
            try:
                parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
                threads = [
                    f"{(task / 'comm').read_text().strip()}: {(task / 'wchan').read_text()}"
                    for task in (folder / "task").iterdir()
                ]
                lines.append(f"process {pid}, started by {parent}, its threads and what they wait for: {threads}")
                if _handles(folder, signal.SIGUSR1):
                    with self.err.open("a") as err:
                        err.write(f"\n--- stacks of process {pid}\n")
                    before, limit = self.err.stat().st_size, time.monotonic() + STACKS_SECONDS
                    os.kill(pid, signal.SIGUSR1)
                    while self.err.stat().st_size == before and time.monotonic() < limit:
                        time.sleep(0.05)
                    time.sleep(0.3)  # the rest of them
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return "\n".join(lines)

    def kill(self) -> None:
        """End all that belongs to the job."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def copies_of(pid: int) -> list[int]:
    """The live processes that a process, or a copy of it, has forked, whoever their parent is now: they look like it."""
    looks = [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != pid:
            try:
                if [(folder / name).read_bytes() for name in ("cmdline", "environ")] == looks:
                    found.append(int(folder.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


def warm_fork_server() -> None:
    """Start the fork server that ranks of this process come from, and wait for its imports: they count for no time limit."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    process = context.Process(target=_nothing)
    process.start()
    process.join()


def _nothing() -> None:
    pass


def _handles(folder: Path, number: signal.Signals) -> bool:
    """Whether a process has a handler of its own for a signal that would end it."""
    caught = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


@dataclass
class Finished:
    """A job that has ended."""

    code: int
    out: str
    err: str
    job: Running
    ended: float

    @property
    def seconds_since_struck(self) -> float:
        """From the planned failure to the end: before it ranks import, for as long as that takes on busy cores."""
        (line, *_) = [line for line in self.out.splitlines() if line.startswith("STRUCK ")]
        return self.ended - float(line.split()[1])

    @property
    def reports(self) -> dict[int, dict[str, Any]]:
        """What the ranks reported at the end of the script, by rank."""
        lines = [line.partition("REPORT ")[2] for line in self.out.splitlines() if "REPORT " in line]
        return {report["rank"]: report for report in map(json.loads, lines)}


def start(
    folder: Path,
    *arguments: str,
    launcher: tuple[str, ...] | None = None,
    env: Mapping[str, str] | None = None,
    script: str = "job.py",
    cold: bool = False,
) -> Running:
    """Start a script of this folder with `arguments`: with the command `launcher`, or its module, or without, in a warm process.

    Without one the rank that the script starts has imported already, too, unless it shall be `cold`.
    """
    tag = uuid.uuid4().hex
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCH_NAMES}
    environment |= {
        "JOB_TAG": tag,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "RES_OPTIONS": "timeout:1 attempts:1",
        **(env or {}),
    }
    out, err = folder / f"{tag}.out", folder / f"{tag}.err"
    command = [*(launcher or ()), str(HERE / script), *arguments]
    if launcher is None or launcher[0] == "-m":
        spare = launcher is None and not cold and not {"fork", "forkserver"} & {*arguments}
        warm = start_warm(*command, folder=folder, environment=environment, out=out, err=err, spare=spare)
        return Running(warm, tag, out, err)
    # A shell that runs tests in the background has them ignore SIGINT, which jobs would inherit.
    interruptible = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with out.open("a") as out_file, err.open("a") as err_file:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=out_file,
            stderr=err_file,
            text=True,
            start_new_session=True,
            preexec_fn=interruptible,
        )
    return Running(process, tag, out, err)


def run(folder: Path, *arguments: str, seconds: float = 200.0, **options: Any) -> Finished:
    """Start `job.py` and wait for its end."""
    return start(folder, *arguments, **options).wait(seconds)

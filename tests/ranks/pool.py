"""The pool: starts rank processes when they are first needed, keeps them, replaces those that died."""

import contextlib
import os
import pickle
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.ranks.call import Call, Report
from tests.ranks.environment import HOST
from tests.ranks.failure import RankError, describe
from tests.ranks.forks import Forked, ForkServer
from tests.ranks.grace import TICK_SECONDS, Grace
from tests.ranks.state import HELD_GROUPS

MOST_RANKS = 16
SLOWEST = 4.0
"""How many times longer than on an idle machine a call may take."""
DUMP_SECONDS = 10.0
TIDY_SECONDS = 60.0


@dataclass(eq=False)
class Worker:
    """A rank process as its pool sees it."""

    process: Forked
    calls: Connection
    control: Connection

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.pid

    @property
    def status(self) -> int | None:
        """What `waitpid` gave for the process, once it has ended."""
        return self.process.status


class RankPool:
    """Runs functions on fresh worlds of 1 to 16 warm processes.

    Use it as a context manager; tests get it through the `ranks` fixture.
    """

    def __init__(self) -> None:
        self._server: ForkServer | None = None
        self._workers: list[Worker] = []
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Do what the first call would else wait for, whose test may look at the clock."""
        self._ready(1)

    def close(self) -> None:
        """End every process of the pool."""
        self._kill(self._workers)
        self._workers.clear()
        if self._server is not None:
            self._server.close()
            self._server = None
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def pids(self) -> list[int]:
        """The processes that are alive, in rank order."""
        return [worker.pid for worker in self._workers]

    def __call__(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 30.0,
        backend: str | None = "gloo",
        env: Mapping[str, str | None] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `function(rank, *args, **kwargs)` on every rank of a fresh world.

        Args:
            world_size: number of ranks, 1 to 16.
            function: a function at the top level of a module.
            args: passed on; must be picklable.
            timeout: seconds that the call may take on an idle machine. After `SLOWEST` times as many the whole set is killed
                and the stacks of the ranks that hung are shown.
            backend: of the process group that is ready when `function` starts; None prepares the environment only,
                as torchrun does, for code that sets up its own (a `Trainer`).
            env: further environment variables; None removes one.
            kwargs: passed on; must be picklable.

        Returns:
            The results, by rank.

        Raises:
            RankError: a rank raised, died, left processes behind, or the time limit passed.
        """
        if not 1 <= world_size <= MOST_RANKS:
            raise ValueError(f"a pool runs 1 to {MOST_RANKS} ranks, got {world_size}")
        payload = pickle.dumps((function, args, kwargs))
        workers = self._ready(world_size)
        store = open_store()
        seconds = SLOWEST * timeout
        deadline = time.monotonic() + seconds
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        reports = [Report(rank) for rank in range(world_size)]
        for rank, worker in enumerate(workers):
            call = Call(
                rank=rank,
                world_size=world_size,
                function=payload,
                port=store.port,
                store=str(folder / "store"),
                backend=backend,
                seconds=seconds,
                environment=dict(env or {}),
                path=list(sys.path),
                folder=os.getcwd(),
                log=str(folder / f"{rank}.log"),
                stacks=str(folder / f"{rank}.stacks"),
            )
            # A worker that died since the last call is found by `_wait`.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                worker.calls.send(call)
        reusable = spent = False
        try:
            reason, first = self._wait(workers, reports, folder, deadline, seconds)
            if reason is None:
                spent = self._tidy(workers, reports)
                first = next((report for report in reports if report.leftovers), None)
                reason = None if first is None else f"rank {first.rank} left something behind"
            if reason is not None:
                raise _error(reason, first, reports)
            reusable = not spent
        finally:
            # After a failure, also an interrupt, no process of the set is trusted. A new one costs a fork.
            if not reusable:
                self._kill(workers)
            self._workers = [worker for worker in self._workers if worker.status is None]
            shutil.rmtree(folder, ignore_errors=True)
        for report in reports:
            # pytest shows this when the test fails later on.
            if report.log:
                print(f"--- rank {report.rank} printed\n{report.log.rstrip()}")
        return [pickle.loads(report.outcome.result) for report in reports if report.outcome and report.outcome.result]

    def _wait(
        self, workers: Sequence[Worker], reports: list[Report], folder: Path, deadline: float, seconds: float
    ) -> tuple[str | None, Report | None]:
        failures: list[Report] = []
        grace = Grace([worker.pid for worker in workers])
        waiting = dict(enumerate(workers))
        with selectors.DefaultSelector() as selector:
            assert self._server is not None
            selector.register(self._server, selectors.EVENT_READ)
            for rank, worker in waiting.items():
                selector.register(worker.calls, selectors.EVENT_READ, rank)
            while waiting and time.monotonic() < deadline:
                ready = selector.select(min(TICK_SECONDS, max(0.0, deadline - time.monotonic())))
                if failures and not ready and grace.over(failures, waiting):
                    break
                for key, _ in ready:
                    if key.data is None:
                        self._server.read_exit()
                    else:
                        # At the end of file the rank is waited for until its exit status comes from the server.
                        selector.unregister(key.fileobj)
                        _receive(workers[key.data], reports[key.data])
                for rank in list(waiting):
                    report, status = reports[rank], workers[rank].status
                    if report.outcome is None and status is not None:
                        _receive(workers[rank], report)  # what it said last
                    if report.outcome is None and status is None:
                        continue
                    del waiting[rank]
                    if report.outcome is None and status is not None:
                        report.signal_or_code = _ending(status)
                        report.log = _read_log(rank, folder)
                        report.stacks = _read_stacks(rank, folder)
                    if report.failed:
                        failures.append(report)
        if waiting:
            self._dump(waiting, reports, folder)
        for report in reports:
            report.log = _read_log(report.rank, folder)
        if failures:
            first = min(failures, key=_hearsay)
            return f"rank {first.rank} of {len(workers)} {first.signal_or_code or 'raised'}", first
        if waiting:
            still = ", ".join(map(str, waiting))
            return f"time limit of {seconds:g} s passed on {len(workers)} ranks; still running: rank {still}", None
        return None, None

    def _tidy(self, workers: Sequence[Worker], reports: list[Report]) -> bool:
        """Lets the workers put everything back, and notes what they could not; returns whether they have to be replaced."""
        for worker in workers:
            with contextlib.suppress(BrokenPipeError):
                worker.calls.send("tidy")
        limit = time.monotonic() + TIDY_SECONDS
        for worker, report in zip(workers, reports, strict=True):
            report.leftovers = ["work that did not end in time after the call"]
            with contextlib.suppress(EOFError, ConnectionResetError):
                if worker.calls.poll(max(0.0, limit - time.monotonic())):
                    report.leftovers = worker.calls.recv()
        # No failure: a test may hold on to a graph, and the collector may be late on busy cores.
        spent = any(HELD_GROUPS in report.leftovers for report in reports)
        for report in reports:
            report.leftovers = [left for left in report.leftovers if left != HELD_GROUPS]
        return spent

    def _dump(self, waiting: Mapping[int, Worker], reports: list[Report], folder: Path) -> None:
        for worker in waiting.values():
            with contextlib.suppress(BrokenPipeError):
                worker.control.send_bytes(b"dump")
        limit = time.monotonic() + DUMP_SECONDS
        for rank, worker in waiting.items():
            with contextlib.suppress(EOFError, OSError):
                if worker.control.poll(max(0.0, limit - time.monotonic())):
                    worker.control.recv_bytes()
            reports[rank].stacks = _read_stacks(rank, folder)

    def _ready(self, count: int) -> list[Worker]:
        if self._server is None:
            self._server = ForkServer()
        self._server.read_exits()
        self._workers = [worker for worker in self._workers if worker.status is None]
        while len(self._workers) < count:
            self._workers.append(self._start_worker())
        return self._workers[:count]

    def _start_worker(self) -> Worker:
        assert self._server is not None
        calls, their_calls = socket.socketpair()
        control, their_control = socket.socketpair()
        process = self._server.fork(None, their_calls.fileno(), their_control.fileno())
        their_calls.close()
        their_control.close()
        return Worker(process, Connection(calls.detach()), Connection(control.detach()))

    def _kill(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            if worker.status is None:
                # The group: data loading processes go too.
                for kill in (os.killpg, os.kill):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        kill(worker.pid, signal.SIGKILL)
            worker.calls.close()
            worker.control.close()
        while any(worker.status is None for worker in workers):
            assert self._server is not None
            self._server.read_exit()


def _hearsay(failure: Report) -> int:
    """How far a failure is from where it began: rank 0 of a job repeats that of another in full, the rest only name it."""
    if not failure.secondary:
        return 0
    return 1 if failure.rank == 0 and failure.tells_of_another else 2


def _receive(worker: Worker, report: Report) -> None:
    with contextlib.suppress(EOFError, OSError):
        if report.outcome is None and worker.calls.poll():
            report.outcome = worker.calls.recv()


def _read_log(rank: int, folder: Path) -> str:
    log = folder / f"{rank}.log"
    return log.read_text(errors="replace") if log.exists() else ""


def _read_stacks(rank: int, folder: Path) -> str:
    stacks = folder / f"{rank}.stacks"
    return stacks.read_text(errors="replace") if stacks.exists() else ""


def _error(reason: str, first: Report | None, reports: list[Report]) -> RankError:
    cause = None
    if first is not None and first.outcome is not None and first.outcome.exception is not None:
        with contextlib.suppress(Exception):
            cause = pickle.loads(first.outcome.exception)
    return RankError(describe(reason, first, reports), None if first is None else first.rank, cause, reports)


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended its process with exit code {code}"


def open_store() -> dist.TCPStore:
    """One for a world of ranks that are started after it."""
    # A socket of our own: reachable from this machine only, and IPv4, so that no name server is asked about clients.
    listener = socket.create_server((HOST, 0), backlog=2 * MOST_RANKS)
    port = listener.getsockname()[1]
    return dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())

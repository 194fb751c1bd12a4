"""The job this process is a rank of."""

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import _TunerExitException  # private; checked with lightning 2.6.6

from lightning_5d.communication import destroy_process_groups
from lightning_5d.launch.environment import variables
from lightning_5d.launch.failure import Failure, RankFailure
from lightning_5d.launch.processes import crashes_shown, describe_exit, kill_children, leave
from lightning_5d.launch.rendezvous import PrefixStore, Rendezvous, second_connection
from lightning_5d.launch.signals import ended_when_stuck
from lightning_5d.launch.supervisor import GRACE_SECONDS, Supervisor

T = TypeVar("T")
_CHILD_CHECK_SECONDS = 0.2
END_SECONDS = 30.0
"""How long the ranks of a finished job may take to end before the next job of the same process starts."""
PARENT_VARIABLE = "FIVED_PARENT_PID"


@dataclass
class Job:
    """A set of ranks that run together, possibly several times: fit, then test.

    Attributes:
        key: Equal for two Trainers of one job in this process.
        rendezvous: Where its ranks meet.
        values: Environment variables that hold while it runs.
        children: Ranks that this process has started, by rank.
    """

    key: tuple[object, ...]
    rendezvous: Rendezvous
    values: Mapping[str, str]
    children: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    supervisor: Supervisor | None = None
    failed: bool = False
    _generation: PrefixStore | None = None
    _made_group: bool = False

    def run(
        self, function: Callable[[], T], noticed: Callable[[], bool], progress: Callable[[], str] = lambda: ""
    ) -> T:
        """Call `function` under supervision; all ranks call this together.

        Args:
            function: What this rank does.
            noticed: Whether the main thread has handled SIGTERM.
            progress: Says how far `function` has come.
        """
        rank, world_size = self.rendezvous.rank, self.rendezvous.world_size
        with variables(self.values):
            if world_size == 1:
                return self._run_alone(function)
            self._generation = self.rendezvous.next_generation()
            self.supervisor = Supervisor(silent=self._end_silent_parent)
            self.supervisor.start(rank, world_size, self._generation, second_connection(self._generation), progress)
            watch = threading.Thread(target=self._watch_children, name="rank-watch", daemon=True)
            watch.start()
            try:
                with crashes_shown(), ended_when_stuck(noticed):
                    result = function()
            except _TunerExitException:  # how the tuner's runs end that have gone well
                self.supervisor.stop()
                raise
            except BaseException as error:
                self.failed = True
                raised = self.supervisor.report(error)
                self.end_children(GRACE_SECONDS)
                if isinstance(raised, RankFailure):
                    raise raised from None
                raise
            self.supervisor.stop()
            return result

    def _run_alone(self, function: Callable[[], T]) -> T:
        # Nobody watches, but the process that started this one may listen.
        self._generation = board = self.rendezvous.next_generation()
        board.add("alive/0", 1)
        try:
            result = function()
        except BaseException as error:
            board.compare_set("failure", "", Failure.of(0, error).to_json())
            raise
        board.set("done/0", "1")
        return result

    def connect(self, backend: str, **options: object) -> None:
        """Makes the default process group, unless an earlier run of this job has."""
        if dist.is_initialized():
            return
        if self._generation is None:
            raise RuntimeError("A process group is made while the job runs.")
        dist.init_process_group(
            backend,
            store=PrefixStore("world", self._generation),
            rank=self.rendezvous.rank,
            world_size=self.rendezvous.world_size,
            **options,  # type: ignore[arg-type]
        )
        self._made_group = True

    def finish(self) -> None:
        """Called at the end of a strategy's teardown."""
        if self.failed and self.supervisor is not None:
            self.supervisor.disarm()

    def end_children(self, seconds: float) -> None:
        """Give the ranks started here some time to end, then kill them."""
        limit = time.monotonic() + seconds
        for child in self.children.values():
            try:
                child.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def close(self) -> None:
        """The job is over: its ranks have ended and its process groups are gone."""
        self.end_children(GRACE_SECONDS if self.failed else END_SECONDS)
        self.finish()
        if self._made_group:
            destroy_process_groups()

    def _end_silent_parent(self, rank: int) -> None:
        # Whoever starts ranks ends them; the rank that is the user's script has nobody above it that would.
        parent = parent_of_ranks()
        if parent == os.getppid() and rank == self.rendezvous.rank - int(os.environ["LOCAL_RANK"]):
            kill_children()  # this process ends with its parent
            os.kill(parent, signal.SIGKILL)

    def _watch_children(self) -> None:
        supervisor = self.supervisor
        if supervisor is None or self._generation is None or not self.children:
            return
        mine = second_connection(self._generation)
        watched = dict(self.children)
        while watched and not supervisor.stopped:
            for rank, child in list(watched.items()):
                code = child.poll()
                if code is None:
                    continue
                del watched[rank]
                with contextlib.suppress(Exception):
                    # What the rank itself has to say is better than its exit code.
                    if not mine.check([f"done/{rank}"]):
                        mine.compare_set("failure", "", Failure(rank, describe_exit(code)).to_json())
            time.sleep(_CHILD_CHECK_SECONDS)


_current: Job | None = None


def current() -> Job | None:
    """The job that this process is a rank of: like the default process group, there is one at a time."""
    return _current


def enter(job: Job) -> None:
    """Make `job` the one this process is a rank of."""
    global _current
    if _current is None:
        atexit.register(_at_exit)
    _current = job


def forget() -> None:
    """This process is a rank of nothing any more."""
    global _current
    if _current is not None:
        _current.close()
        atexit.unregister(_at_exit)
    _current = None


def _at_exit() -> None:
    # The ranks started here may have things to do after training, and the store lives in this process.
    job = _current
    if job is None or job.rendezvous.hosting is None:
        return
    raised = job.failed or getattr(sys, "last_value", None) is not None
    if raised:
        job.end_children(GRACE_SECONDS)
        return
    if job.supervisor is not None:
        job.supervisor.wait_for_others()
    codes = {rank: child.wait() for rank, child in job.children.items()}
    bad = {rank: code for rank, code in codes.items() if code != 0}
    if bad:
        for rank, code in bad.items():
            print(f"rank {rank} {describe_exit(code)}, after training", file=sys.stderr, flush=True)
        leave(1)


def parent_of_ranks() -> int | None:
    """The process that started this one as a rank, if that was this package."""
    pid = os.environ.get(PARENT_VARIABLE)
    return None if pid is None else int(pid)

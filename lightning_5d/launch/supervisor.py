"""Every rank learns of the first failure within a second or two, and the job ends, whatever anyone waits for."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_5d.launch.failure import Failure, RankFailure, is_lost_peer
from lightning_5d.launch.processes import leave
from lightning_5d.launch.pulse import SILENCE_SECONDS, Pulse
from lightning_5d.launch.rendezvous import Store
from lightning_5d.launch.waiting import BUSY_SHARE, Waiting, processor_seconds

_POLL_SECONDS = 0.5
LOST_PEER_SECONDS = 5.0
"""How long a rank that lost a peer waits to hear why, before it calls that the failure."""
GRACE_SECONDS = 3.0
"""How long a rank may wait after it has heard of another's failure. One that computes may be about to fail by itself."""
LAST_WORDS_SECONDS = 15.0
"""How long the rank that failed may spend in `on_exception` hooks and teardown, and any other until it fails."""
DONE_SECONDS = 10.0
"""How long the rank that hosts the store stays for those that are not done."""
_TOLD_SECONDS = 12.0
"""How long a failed rank waits for rank 0 to show its traceback: rank 0 may hear of it in a poll, and be ended after its grace."""
_ASK_SECONDS = 0.1


class Supervisor:
    """One rank's share in the supervision of a run.

    A thread polls the store, over a connection of its own, so it works while the main thread is stuck in a collective.
    The order of calls: `start`, then `stop` if the run went well, else `report` and, after teardown, `disarm`.

    Args:
        exit: Called with the exit code when the main thread has not ended in time.
        silent: Called right before that with a rank that this one has found silent: it may be frozen, and never end by itself.
    """

    def __init__(self, exit: Callable[[int], None] = leave, silent: Callable[[int], None] = lambda rank: None) -> None:
        self._exit = exit
        self._end_silent = silent
        self._silent: int | None = None
        self._rank = 0
        self._world_size = 1
        self._store: Store | None = None
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._deadline: float | None = None
        self._reported = False
        self._main = 0
        self._computed = self._waited = 0.0
        self._first: Failure | None = None
        self._pulse: Pulse | None = None
        self._waiting: Waiting | None = None

    @property
    def failure(self) -> Failure | None:
        """The job's first failure, as far as this rank knows."""
        return self._first

    @property
    def stopped(self) -> bool:
        """Whether the watch has ended."""
        return self._stopped.is_set()

    def start(
        self, rank: int, world_size: int, store: Store, watched: Store, progress: Callable[[], str] = lambda: ""
    ) -> None:
        """Begin to watch, among other things the calling thread.

        Args:
            rank: Of this process.
            world_size: Number of ranks.
            store: For calls from the main thread; keys of earlier runs must not be visible in it.
            watched: The same keys through another connection, for the thread.
            progress: Says how far this rank has come.
        """
        self._rank, self._world_size, self._store = rank, world_size, store
        self._main = threading.get_ident()
        self._pulse = Pulse(rank, world_size)
        self._pulse.begin(store)
        self._waiting = Waiting(rank, world_size, progress)
        self._thread = threading.Thread(target=self._watch, args=(watched,), name="supervisor", daemon=True)
        self._thread.start()

    def post(self, failure: Failure) -> Failure:
        """Make `failure` the job's first, unless there is one; returns the first."""
        if self._store is None:
            self._first = self._first or failure
            return self._first
        try:
            self._first = Failure.from_json(self._store.compare_set("failure", "", failure.to_json()))
        except Exception:
            # The process that hosts the store is gone, and nobody can be told.
            self._first = self._first or failure
        return self._first

    def report(self, error: BaseException) -> BaseException:
        """Tell everyone that this rank raised.

        Returns:
            What to raise: `error`, with a note of the rank, or a `RankFailure` if another rank failed before. Where all
            ranks fail alike, as when they find the same setting wrong, rank 0 raises its own, whichever was first.
        """
        self._reported = True
        self._deadline = time.monotonic() + LAST_WORDS_SECONDS
        if is_lost_peer(error):
            self._listen(LOST_PEER_SECONDS)
        mine = Failure.of(self._rank, error)
        first = self.post(mine)
        if isinstance(error, SIGTERMException):
            # It is a SystemExit without a code: the job would count as well done.
            error.code = error.code or 128 + signal.SIGTERM
        if isinstance(error, KeyboardInterrupt | SystemExit):
            return error
        if first.rank != self._rank:
            tell = self._rank == 0
            if tell:
                self._told(self._store)
                if mine.what == first.what:
                    error.add_note(f"[rank {first.rank} of {self._world_size} failed first, and alike]")
                    return error
            else:
                _quiet_excepthook(
                    f"[rank {self._rank}] stopped: {first.describe(self._world_size, False)}", lambda: True
                )
            return RankFailure(first.describe(self._world_size, with_traceback=tell), first)
        error.add_note(f"[rank {self._rank} of {self._world_size} failed first]")
        if self._rank != 0:
            _quiet_excepthook(f"[rank {self._rank}] {first.what} (traceback: see rank 0)", self._wait_told)
        return error

    def stop(self) -> None:
        """End the watch: this rank's run is over, well or not."""
        if self._thread is None or self._stopped.is_set():
            return
        self._stopped.set()
        self._thread.join(2 * _POLL_SECONDS)
        self._waiting = None  # it knows the Trainer, which need not live as long as the job
        if self._first is None and self._store is not None:
            with contextlib.suppress(Exception):
                self._store.set(f"done/{self._rank}", "1")
                self._store.add("done", 1)

    def disarm(self) -> None:
        """End the watch after a failure: hooks and teardown are over, and what comes next is the user's."""
        self._stopped.set()

    def wait_for_others(self) -> None:
        """Stay until every rank has called `stop`, for a while: for the process that hosts the store."""
        if self._store is None or self._first is not None:
            return
        limit = time.monotonic() + DONE_SECONDS
        with contextlib.suppress(Exception):
            while self._store.add("done", 0) < self._world_size and time.monotonic() < limit:
                time.sleep(0.02)

    def _watch(self, store: Store) -> None:
        while not self._stopped.wait(_POLL_SECONDS):
            if self._first is None:
                with contextlib.suppress(Exception):
                    self._look(store)
            if self._first is not None and self._is_over():
                self._end(store)

    def _is_over(self) -> bool:
        """Whether this rank has had its time since it heard of a failure, or had one."""
        if self._deadline is None:
            self._deadline = time.monotonic() + LAST_WORDS_SECONDS
        if not self._reported:
            computed = processor_seconds(self._main)
            # In looks: a process that does not get to run does not wait.
            still = computed - self._computed < BUSY_SHARE * _POLL_SECONDS
            self._waited = self._waited + _POLL_SECONDS if still else 0.0
            self._computed = computed
            if self._waited > GRACE_SECONDS:
                return True
        return time.monotonic() > self._deadline

    def _look(self, store: Store) -> None:
        try:
            if store.check(["failure"]):
                self._first = Failure.from_json(store.get("failure"))
                return
            silent = self._pulse.beat(store) if self._pulse is not None else None
            if silent is not None:
                self._silent = silent
                gone = Failure(
                    silent,
                    f"has given no sign of life for {SILENCE_SECONDS:.0f} s: killed, frozen, or its machine is gone",
                )
                self._first = Failure.from_json(store.compare_set("failure", "", gone.to_json()))
                return
            waiting = self._waiting  # the main thread lets go of it when the run is over
            stuck = waiting.look(store) if waiting is not None else None
            if stuck is not None:
                self._first = Failure.from_json(store.compare_set("failure", "", stuck.to_json()))
        except RuntimeError as error:
            if not self._stopped.is_set():
                self._first = Failure(0, f"cannot be reached any more ({error})")

    def _end(self, store: Store) -> None:
        if self._stopped.is_set() or self._first is None:
            return
        first = self._first
        shown_here = False
        with contextlib.suppress(Exception):
            shown_here = bool(first.table) and store.check(["done/0"])
        if self._rank != 0 and shown_here:
            print(first.describe(self._world_size), file=sys.stderr, flush=True)
        elif self._rank != 0:
            print(
                f"[rank {self._rank}] stopped: {first.describe(self._world_size, False)}", file=sys.stderr, flush=True
            )
        elif first.rank != 0 or first.table:
            print(first.describe(self._world_size), file=sys.stderr, flush=True)
            # Through the thread's own connection: the main thread may sit in a wait on the other.
            self._told(store)
        if self._silent is not None:
            self._end_silent(self._silent)
        self._exit(1)

    def _told(self, store: Store | None) -> None:
        if store is not None:
            with contextlib.suppress(Exception):
                store.set("told", "1")

    def _wait_told(self) -> bool:
        return self._poll("told", _TOLD_SECONDS)

    def _listen(self, seconds: float) -> None:
        if self._poll("failure", seconds) and self._store is not None:
            with contextlib.suppress(Exception):
                self._first = Failure.from_json(self._store.get("failure"))

    def _poll(self, key: str, seconds: float) -> bool:
        if self._store is None:
            return False
        # So many looks, not so much time: while this process did not get to run, the others may not have either.
        for _ in range(round(seconds / _ASK_SECONDS)):
            try:
                if self._store.check([key]):
                    return True
            except RuntimeError:
                return False
            time.sleep(_ASK_SECONDS)
        return False


def _quiet_excepthook(line: str, when: Callable[[], bool]) -> None:
    """Print one line instead of a traceback that rank 0 shows, so that the first one is not drowned."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if when():
            print(line, file=sys.stderr, flush=True)
        else:
            previous(kind, error, trace)

    sys.excepthook = hook

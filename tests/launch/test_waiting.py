"""Ranks that wait for each other in different places end with an error that shows where; one that computes is waited for."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_5d.launch.rendezvous import HashStore
from lightning_5d.launch.waiting import LOOK_SECONDS, WAIT_SECONDS, Place, Waiting, parted
from tests.launch.running import start
from tests.launch.test_pulse import Clock

# A function that waits without a Python frame of its own below it, as a collective does, in a file of torch.distributed.
_SOURCE = "def all_reduce(lock):\n    lock.acquire()\n"
_COLLECTIVE: dict[str, Any] = {}
exec(compile(_SOURCE, os.path.join(os.path.dirname(dist.__file__), "made_up.py"), "exec"), _COLLECTIVE)


def training(lock: threading.Lock) -> None:
    _COLLECTIVE["all_reduce"](lock)


def validation(lock: threading.Lock) -> None:
    _COLLECTIVE["all_reduce"](lock)


def computing(lock: threading.Lock) -> None:
    lock.acquire()


@contextmanager
def threads(*functions: Any) -> Iterator[list[int]]:
    """Threads that stand in for ranks' main threads, each inside of its function."""
    # One lock each: of two threads that wait for one, the other may get it.
    locks = [threading.Lock() for _ in functions]
    started = []
    for function, lock in zip(functions, locks, strict=True):
        lock.acquire()
        started.append(threading.Thread(target=function, args=(lock,), daemon=True))
        started[-1].start()
    idents = [thread.ident or 0 for thread in started]
    for ident in idents:
        while sys._current_frames()[ident].f_code.co_name not in ("all_reduce", "computing"):
            time.sleep(0.01)
    try:
        yield idents
    finally:
        for thread, lock in zip(started, locks, strict=True):
            lock.release()
            thread.join()


def _failures(places: list[Any], seconds: float, progress: tuple[str, ...] = ("", ""), pause: float = 0.0) -> list[Any]:
    clock, store, found = Clock(), HashStore(), []
    with threads(*places) as idents:
        ranks = [
            Waiting(rank, len(idents), lambda rank=rank: progress[rank], ident, clock)  # type: ignore[misc]
            for rank, ident in enumerate(idents)
        ]
        while clock.now < seconds:
            found += [failure for rank in ranks if (failure := rank.look(store)) is not None]
            clock.now += LOOK_SECONDS
            if clock.now == 2 * LOOK_SECONDS:
                clock.now += pause
    return found


def test_ranks_in_different_collectives_are_told_apart_and_named() -> None:
    limit = WAIT_SECONDS + 2 * LOOK_SECONDS
    assert _failures([training, validation], WAIT_SECONDS) == []
    failure, *_ = _failures([training, validation], limit, ("training, batch 3", "validation, batch 0"))
    assert failure.rank == 1
    rows = failure.table.splitlines()
    assert rows[1].startswith("  rank 0: training, batch 3, waits in all_reduce, called from ")
    assert "test_waiting.py" in rows[1]
    assert "(training)" in rows[1]
    assert "(validation)" in rows[2]


def test_a_pause_of_the_whole_machine_is_no_wait() -> None:
    pause = 3 * WAIT_SECONDS
    assert _failures([training, validation], pause + WAIT_SECONDS, pause=pause) == []
    assert _failures([training, validation], pause + WAIT_SECONDS + 3 * LOOK_SECONDS, pause=pause) != []


def test_ranks_that_have_come_differently_far_are_told_apart_in_one_place() -> None:
    assert _failures([training, training], 60.0, ("batch 3", "batch 3")) == []
    assert _failures([training, training], 60.0, ("batch 3", "batch 4")) != []


def test_a_rank_that_computes_is_waited_for() -> None:
    assert _failures([training, computing], 600.0) == []
    assert _failures([computing, training], 600.0) == []


def test_a_rank_that_ended_frees_nobody() -> None:
    failure = parted([Place("", "", "", "a")] * 3 + [Place("", "", "", "b")])
    assert failure is not None
    assert failure.rank == 3
    clock, store = Clock(), HashStore()
    store.set("done/0", "1")
    found = []
    with threads(training) as (ident,):
        last = Waiting(1, 2, lambda: "", ident, clock)
        while clock.now < 30 and not found:
            found += [failure for failure in [last.look(store)] if failure is not None]
            clock.now += LOOK_SECONDS
    assert found[0].rank == 0
    assert "has ended its run" in found[0].what


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_parted_ranks_end_the_job_soon_and_a_slow_one_does_not(tmp_path: Path) -> None:
    patient = ("--patience", "6")  # half of what the slow rank takes
    slow = start(tmp_path, "--where", "training_step", "--how", "nap", "--stage", "0", *patient)
    forward = start(tmp_path, "--where", "forward", "--stage", "3", *patient)
    loop = start(tmp_path, "--where", "loop", "--stage", "1", *patient)
    for job, called in ((forward, "extra_forward"), (loop, None)):
        job.wait_for("TRAINING", 2, 200)
        began = time.monotonic()
        ended = job.wait(100)
        assert ended.code != 0
        assert time.monotonic() - began < 40
        assert called is None or called in ended.err
        assert "rank 1" in ended.err
        assert job.left_after(25) == []
    assert slow.wait(300).code == 0

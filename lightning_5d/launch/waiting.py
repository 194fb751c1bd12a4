"""Ranks that wait for each other for ever: how a job notices, and where each of them waits."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import TYPE_CHECKING

import lightning
import torch.distributed as dist

import lightning_5d
from lightning_5d.launch.failure import Failure
from lightning_5d.launch.rendezvous import Store

if TYPE_CHECKING:
    import lightning.pytorch as pl

WAIT_SECONDS = 20.0
"""How long all ranks have to stand still, in different places, before their job is ended."""
LOOK_SECONDS = 2.0
BUSY_SHARE = 0.02
"""Of the time, that a thread computes which merely asks now and then whether its wait is over."""
_PLACES_SHOWN = 8
_OUTSIDE = "outside of its loops"

_DISTRIBUTED = os.path.dirname(dist.__file__)
_OWN = os.path.dirname(lightning_5d.__file__)
_LIGHTNING = os.path.dirname(lightning.__file__)
_SITE = os.path.dirname(_LIGHTNING)
_WAITING = (
    _DISTRIBUTED + os.sep,
    os.path.join(_OWN, "data_parallel", ""),
    os.path.join(_OWN, "logs", ""),
    os.path.join(_OWN, "pipeline_parallel", "channels", ""),
    os.path.join(_OWN, "communication.py"),
)
_NOT_WAITING = (os.path.join(_DISTRIBUTED, "checkpoint", ""),)  # it waits for disks


@dataclass(frozen=True)
class Place:
    """Where a rank waits for others.

    Attributes:
        progress: How far its loops have come.
        call: The innermost function of a person's own code, and before it that of Lightning's, if that was between.
        inside: The function that waits.
        stack: All calls around the wait, to compare with those of other ranks.
    """

    progress: str
    call: str
    inside: str
    stack: str

    def __str__(self) -> str:
        return f"{self.progress}, waits in {self.inside}, called from {self.call}"


_ENDED = Place("", "", "", "ended")


def waiting_place(frame: FrameType | None, progress: str) -> Place | None:
    """Where a thread waits for other ranks, or ``None`` if it computes, reads or sleeps.

    Args:
        frame: The thread's innermost frame.
        progress: How far its loops have come.
    """
    inside = ""
    while frame is not None and _waits(frame.f_code.co_filename):
        inside = frame.f_code.co_name
        frame = frame.f_back
    if not inside or frame is None:
        return None
    lines, call, lightnings = [], "", ""
    while frame is not None:
        name = frame.f_code.co_filename
        line = f"{name}:{frame.f_lineno} ({frame.f_code.co_name})"
        lines.append(line)
        if not call and not lightnings and name.startswith(_LIGHTNING):
            lightnings = line
        if not call and not name.startswith((_SITE, _OWN, os.path.dirname(os.__file__), "<")):
            call = line
        frame = frame.f_back
    callers = [line for line in (lightnings, call) if line] or lines[:1]
    return Place(progress, ", called from ".join(callers), inside, "\n".join(lines))


def _waits(filename: str) -> bool:
    return filename.startswith(_WAITING) and not filename.startswith(_NOT_WAITING)


class Waiting:
    """One rank's share in finding out that nobody can go on.

    A rank stands still when its thread has been in one wait for others for `WAIT_SECONDS`, without computing. If all ranks that have
    not ended do, in different places, or if some have ended, no later event can free them. A rank that computes, for
    however long, is no reason to end a job; neither is one place where all wait: that may be a slow network.

    Args:
        rank: Of this process.
        world_size: Number of ranks.
        progress: Says how far the loops have come.
        thread: The thread to watch; the calling one if ``None``.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        progress: Callable[[], str],
        thread: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank, self._world_size, self._progress, self._clock = rank, world_size, progress, clock
        self._thread = threading.get_ident() if thread is None else thread
        self._next = clock()
        self._since: tuple[Place, float, float] | None = None
        self._posted = False

    def look(self, store: Store) -> Failure | None:
        """Tells others when this rank stands still; returns the failure if all do."""
        now = self._clock()
        if now < self._next:
            return None
        if (late := now - self._next) > LOOK_SECONDS and self._since is not None:
            # This process did not get to run, and so cannot have gone on.
            stood, since, computed = self._since
            self._since = (stood, since + late, computed)
        self._next = now + LOOK_SECONDS
        place, busy = self._place(), processor_seconds(self._thread)
        if place is None or self._since is None or self._since[0] != place:
            self._since = None if place is None else (place, now, busy)
        else:
            _, since, before = self._since
            if busy - before > BUSY_SHARE * max(now - since, LOOK_SECONDS):
                self._since = (place, now, busy)  # it goes on, and merely waits whenever somebody looks
        still = self._since is not None and now - self._since[1] >= WAIT_SECONDS
        if still and not self._posted and place is not None:
            store.set(f"waits/{self._rank}", json.dumps(asdict(place)))
        elif self._posted and not still:
            store.set(f"waits/{self._rank}", "")
        self._posted = still
        if not still or any(not store.check([f"done/{rank}"]) for rank in range(self._rank)):
            return None  # the first rank that has not ended decides
        places = self._places(store)
        return None if places is None else parted(places)

    def _places(self, store: Store) -> list[Place] | None:
        """Where all ranks stand still, or ``None`` if one does not."""
        found = []
        for rank in range(self._world_size):
            if store.check([f"done/{rank}"]):
                found.append(_ENDED)
                continue
            text = store.get(f"waits/{rank}") if store.check([f"waits/{rank}"]) else b""
            if not text:
                return None
            found.append(Place(**json.loads(text)))
        return found

    def _place(self) -> Place | None:
        return waiting_place(sys._current_frames().get(self._thread), self._progress())


def processor_seconds(thread: int) -> float:
    """How long a thread of this process, which has not ended, has computed; 0 where the system does not say."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def parted(places: Sequence[Place]) -> Failure | None:
    """The failure of ranks that stand still, by rank; ``None`` if they are in one place, where something may yet come."""
    by_place: dict[Place, list[int]] = {}
    for rank, place in enumerate(places):
        by_place.setdefault(place, []).append(rank)
    if len(by_place) == 1:
        return None
    # The odd ones out: those that have ended, or the smallest group.
    odd = by_place.get(_ENDED) or min(reversed(by_place.values()), key=len)
    what = "has ended its run" if places[odd[0]] is _ENDED else "waits where others do not come"
    lines = [f"All ranks have stood still for {WAIT_SECONDS:g} s:"]
    for place, ranks in list(by_place.items())[:_PLACES_SHOWN]:
        shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
        lines.append(f"  rank {shown}: {'has ended its run' if place is _ENDED else place}")
    lines.append("Loops and collectives must be the same on every rank; only rank 0 writing a file, say, may differ.")
    return Failure(odd[0], f"{what}, so the ranks wait for each other for ever", table="\n".join(lines))


def progress_of(trainer: pl.Trainer | None) -> Callable[[], str]:
    """Says how far a Trainer's loops have come, in words; does not keep the Trainer alive once its run is over."""
    if trainer is None:
        return lambda: _OUTSIDE
    reference = weakref.ref(trainer)

    def progress() -> str:
        trainer = reference()
        return _OUTSIDE if trainer is None else _progress(trainer)

    return progress


def _progress(trainer: pl.Trainer) -> str:
    if trainer.state.stage is None:
        return _OUTSIDE
    stage = trainer.state.stage.value
    if trainer.training:
        return (
            f"{stage}, epoch {trainer.current_epoch}, batch {trainer.fit_loop.epoch_loop.batch_progress.current.ready}"
        )
    if (loop := trainer._active_loop) is None or not hasattr(loop, "batch_progress"):
        return stage
    inside = f", epoch {trainer.current_epoch}" if trainer.state.fn == "fit" else ""
    return f"{stage}{inside}, batch {loop.batch_progress.current.ready}"

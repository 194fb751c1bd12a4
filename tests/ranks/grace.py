"""How long the other ranks may still answer after a failure: their own errors help to understand it."""

import contextlib
from collections.abc import Collection, Sequence
from pathlib import Path

from tests.ranks.call import Report

TICK_SECONDS = 0.1
IDLE_TICKS = 10
"""So long in a row nobody who has not answered may have done anything."""
HEARSAY_TICKS = 60
"""Where all failures are other ranks', as their ranks were told: a supervisor takes 3 s to end a rank that waits."""
MOST = 10
"""A rank that never rests is waited for so many times longer."""
_BUSY_NANOSECONDS = 2e6


class Grace:
    """Counts looks, not seconds: a machine that stands still for a while, or runs something else, takes nothing away.

    Args:
        pids: The processes, by rank.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._ticks = self._idle = 0
        self._used: dict[int, float] = {}

    def over(self, failures: Sequence[Report], waiting: Collection[int]) -> bool:
        """Called about every `TICK_SECONDS` once something has failed: whether to stop waiting for the other ranks."""
        self._ticks += 1
        busy = [rank for rank in waiting if self._is_busy(rank)]
        self._idle = 0 if busy else self._idle + 1
        limit = HEARSAY_TICKS if all(failure.secondary for failure in failures) else IDLE_TICKS
        return self._idle > limit or self._ticks > MOST * limit

    def _is_busy(self, rank: int) -> bool:
        """Whether the main thread has run since the last look, or wants to."""
        before, state = self._used.get(rank, 0.0), ""
        with contextlib.suppress(OSError):
            folder = Path(f"/proc/{self._pids[rank]}")
            state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
            # Time on a core, and in the queue for one.
            self._used[rank] = sum(map(int, (folder / "schedstat").read_text().split()[:2]))
        return state in ("R", "D") or self._used.get(rank, 0.0) - before > _BUSY_NANOSECONDS

"""Signs of life: how a job notices a rank that went without a word, on whatever machine it was."""

import time
from collections.abc import Callable

from lightning_5d.launch.rendezvous import Store

BEAT_SECONDS = 2.0
SILENCE_SECONDS = 20.0
"""How long a rank may be silent. Its thread needs the interpreter lock now and then, so a pause of seconds says nothing."""


class Pulse:
    """One rank's signs of life, and the watch over others': rank 0 watches all, and all watch rank 0.

    A rank that is killed cannot say so. Its parent notices on the same machine; over machines nobody would until a
    collective times out, and then without a name. A rank that is frozen, its interpreter lock held by a call that does not
    return, is noticed by nobody else at all.

    Args:
        rank: Of this process.
        world_size: Number of ranks.
        clock: Seconds that only grow.
    """

    def __init__(self, rank: int, world_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rank, self._clock = rank, clock
        self._next = clock()
        self._others = range(1, world_size) if rank == 0 else range(1)
        self._heard: dict[int, tuple[int, float]] = {}

    def begin(self, store: Store) -> None:
        """Gives the first sign of life: only a rank that has given one can be missed, and one may freeze before its watch first looks."""
        store.add(f"alive/{self._rank}", 1)

    def beat(self, store: Store) -> int | None:
        """Gives a sign of life when one is due; returns a rank under watch that has been silent for too long, if any."""
        now = self._clock()
        if now < self._next:
            return None
        if (late := now - self._next) > BEAT_SECONDS:
            # This process did not get to run: nobody can have been heard, and on the same machine nobody may have run.
            self._heard = {rank: (count, since + late) for rank, (count, since) in self._heard.items()}
        self._next = now + BEAT_SECONDS
        store.add(f"alive/{self._rank}", 1)
        for rank in self._others:
            count = store.add(f"alive/{rank}", 0)
            known, since = self._heard.get(rank, (-1, now))
            if count != known:
                self._heard[rank] = (count, now)
            elif count and now - since > SILENCE_SECONDS and not store.check([f"done/{rank}"]):
                return rank
        return None

"""What the process that started ranks hears from them: that each begins, lives, and ends when its work is done."""

from collections.abc import Iterable

from lightning_5d.launch.failure import Failure
from lightning_5d.launch.pulse import SILENCE_SECONDS
from lightning_5d.launch.rendezvous import Store

LOOK_SECONDS = 1.0
START_SECONDS = {"fork": 60.0, "forkserver": 300.0, "spawn": 300.0}
"""How long a rank may take to its first sign of life: others import torch and the script, a forked one has it all."""
FROZEN_SECONDS = SILENCE_SECONDS + 10.0
"""How long a rank may be silent after that. Ranks notice each other's silence before, unless none of them runs."""
END_SECONDS = 120.0
"""How long a rank may take to end when its work is done: threads that it has started may have things to send."""


class Watch:
    """Signs of life of all ranks of a job, as their parent sees them.

    Time is counted in looks: while this process did not get to run, its ranks may not have either.

    Args:
        board: The job's store.
        world_size: Number of ranks. One alone gives a sign of life at its begin and at its end only.
        method: How they were started.
    """

    def __init__(self, board: Store, world_size: int, method: str) -> None:
        self._board, self._world_size, self._method = board, world_size, method
        self._heard: dict[int, tuple[int, bool]] = {}
        self._looks: dict[int, int] = {}
        self._late: int | None = None

    @property
    def late(self) -> str | None:
        """Names a rank that was done and has not ended in time; what it had to give has been given."""
        if self._late is None:
            return None
        return (
            f"The work of rank {self._late} is done, and {END_SECONDS:.0f} s later its process has not ended: something that was"
            " started in it goes on, a thread or a process. It is killed; results are not affected."
        )

    def look(self, running: Iterable[int]) -> Failure | None:
        """To be called every `LOOK_SECONDS`; returns the failure that one of the ranks `running` is by its silence."""
        for rank in running:
            heard = (self._board.add(f"alive/{rank}", 0), self._board.check([f"done/{rank}"]))
            self._looks[rank] = self._looks[rank] + 1 if heard == self._heard.get(rank) else 0
            self._heard[rank] = heard
            beats, done = heard
            silent = self._looks[rank] * LOOK_SECONDS
            if done:
                if silent > END_SECONDS:
                    self._late = rank
            elif not beats:
                if silent > START_SECONDS[self._method]:
                    return self._not_started(rank)
            elif self._world_size > 1 and silent > FROZEN_SECONDS:
                return Failure(rank, f"has given no sign of life for {FROZEN_SECONDS:.0f} s: it is frozen")
        return None

    def _not_started(self, rank: int) -> Failure:
        method = self._method
        why = (
            '. What other threads of this process had locked when it was forked stays locked there: use start_method="popen" or'
            ' "forkserver"'
            if method == "fork"
            else ""
        )
        return Failure(
            rank, f'was started by "{method}" and has given no sign of life for {START_SECONDS[method]:.0f} s{why}'
        )

"""What a rank writes down while it runs a step, in less time than anybody could notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

import torch

Mark = float | torch.Event
"""A moment: seconds of the host's clock, or where an accelerator's current stream was."""

SEND = "send"
RECEIVE = "receive"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a rank did.

    Attributes:
        kind: ``"F"``, ``"B"``, ``"W"`` or ``"BW"`` for a computation, ``"send"`` or ``"receive"`` for a message.
        stage: The stage that was computed, or the one that a message is for.
        microbatch: Of the computation, or of the message.
        start: In seconds.
        end: In seconds.
        live: Activations that the rank keeps after it, in microbatches of one stage.
        peer: The other rank of a message, counted along the pipeline.
        nbytes: Size of a message.
    """

    kind: str
    stage: int
    microbatch: int
    start: float
    end: float
    live: int
    peer: int | None = None
    nbytes: int = 0

    @property
    def computes(self) -> bool:
        """Whether it is a computation."""
        return self.kind not in (SEND, RECEIVE)

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start

    def later(self, seconds: float) -> Event:
        """The same on a clock that is ahead by so many seconds."""
        return replace(self, start=self.start + seconds, end=self.end + seconds)


class Recorder:
    """Takes down the events of one rank; nothing here waits for an accelerator until `take`.

    ```python
    mark = recorder.begin()
    ...  # the work
    recorder.end(mark, "F", stage, microbatch, live)
    ```

    On CPU a pair of calls takes well under 2 microseconds. On an accelerator a mark is an event on the current stream, so times
    are those of the device's work and not of its being asked for.

    Args:
        device: Where the work happens.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._rows: list[tuple[Mark, Mark, str, int, int, int, int | None, int]] = []
        self.begin: Callable[[], Mark] = perf_counter if self._device.type in ("cpu", "meta") else self._event

    def end(
        self,
        mark: Mark,
        kind: str,
        stage: int,
        microbatch: int,
        live: int,
        *,
        peer: int | None = None,
        nbytes: int = 0,
    ) -> None:
        """Notes that what began at ``mark`` is over; the arguments are those of `Event`."""
        self._rows.append((mark, self.begin(), kind, stage, microbatch, live, peer, nbytes))

    def restart(self) -> None:
        """Forgets all events: the step begins again."""
        self._rows.clear()

    def take(self) -> tuple[Event, ...]:
        """All events so far, by the host's ``perf_counter``, in the order they began; the recorder is empty after it.

        An accelerator is waited for here, as its events are placed on the host's clock.
        """
        rows, self._rows = self._rows, []
        at = self._clock()
        events = (
            Event(str(kind), stage, microbatch, at(start), at(end), live, peer, nbytes)
            for start, end, kind, stage, microbatch, live, peer, nbytes in rows
        )
        return tuple(sorted(events, key=lambda event: (event.start, event.end)))

    def _event(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _clock(self) -> Callable[[Mark], float]:
        if self._device.type in ("cpu", "meta"):
            return lambda mark: mark if isinstance(mark, float) else float("nan")
        now = self._event()
        now.synchronize()
        host = perf_counter()

        def at(mark: Mark) -> float:
            return mark if isinstance(mark, float) else host - float(mark.elapsed_time(now)) / 1000

        return at

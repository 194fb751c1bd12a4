"""What travels between the pool and a rank process."""

import re
from dataclasses import dataclass, field

from lightning_5d.launch.failure import LOST_PEER

NAMES_ANOTHER = "lightning_5d.launch.failure.RankFailure: rank "
STOPPED_FOR_ANOTHER = re.compile(r"^(\[rank \d+\] stopped: )?rank \d+ of \d+ failed first: ", re.MULTILINE)
"""What a process that its supervisor ends prints before."""


@dataclass(frozen=True)
class Call:
    """One rank's share of a call: `function` is a pickle of (function, args, kwargs)."""

    rank: int
    world_size: int
    function: bytes
    port: int
    store: str
    backend: str | None
    seconds: float
    environment: dict[str, str | None]
    path: list[str]
    folder: str
    log: str
    stacks: str


@dataclass(frozen=True)
class Outcome:
    """A rank's answer: a pickled result, or the text of what went wrong."""

    rank: int
    result: bytes | None = None
    failure: str | None = None
    exception: bytes | None = None


@dataclass
class Report:
    """What the pool knows about a rank once the call has ended."""

    rank: int
    outcome: Outcome | None = None
    signal_or_code: str | None = None
    stacks: str = ""
    log: str = ""
    leftovers: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether the rank raised or died."""
        return self.signal_or_code is not None or (self.outcome is not None and self.outcome.failure is not None)

    @property
    def tells_of_another(self) -> bool:
        """Whether the failure is another rank's, as this rank was told of it."""
        if self.signal_or_code is not None:
            return STOPPED_FOR_ANOTHER.search(self.log) is not None
        return NAMES_ANOTHER in self._text

    @property
    def secondary(self) -> bool:
        """Whether the failure only says that another rank failed, or is gone."""
        return self.tells_of_another or any(sign in self._text for sign in LOST_PEER)

    @property
    def _text(self) -> str:
        return (self.outcome.failure or "") if self.outcome is not None else ""

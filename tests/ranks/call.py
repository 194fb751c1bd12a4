"""What travels between the pool and a rank process."""

from dataclasses import dataclass, field

LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
NAMES_ANOTHER = "lightning_5d.launch.failure.RankFailure: rank "


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
    def secondary(self) -> bool:
        """Whether the failure only says that another rank is gone."""
        text = self.outcome.failure if self.outcome is not None and self.outcome.failure is not None else ""
        # Rank 0 of a job repeats the failure of another in full, the rest only name it.
        named = self.rank != 0 and NAMES_ANOTHER in text
        return named or any(sign in text for sign in LOST_PEER)

"""What a failing rank tells the others."""

import json
import traceback
from dataclasses import asdict, dataclass

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

LOST_PEER = (
    "Connection closed by peer",
    "is gone: it ended, or closed its connections",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "remote worker crashing",
    "remote process exited",
    "Socket Timeout",
    "Timed out waiting",
    "of the data group is gone",
    "of the pipeline is gone",
)
"""What gloo, NCCL, the store and transports of this package say when the process at the other end is gone."""


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong in a job.

    Attributes:
        rank: Global rank it happened on.
        what: One line, to be read after "rank 3 ".
        traceback: Text of the rank's traceback; empty when there is none, as for a killed process.
        table: More lines, for the one place where the failure is shown in full.
    """

    rank: int
    what: str
    traceback: str = ""
    table: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> "Failure":
        """The failure that an exception on `rank` is."""
        line = _headline(error)
        if isinstance(error, KeyboardInterrupt):
            return cls(rank, "was interrupted (SIGINT)")
        if isinstance(error, SIGTERMException):
            return cls(rank, "was told to end (SIGTERM)")
        return cls(rank, f"raised {line}", "".join(traceback.format_exception(error)))

    def to_json(self) -> str:
        """Text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Failure":
        """The inverse of `to_json`."""
        return cls(**json.loads(text))

    def describe(self, world_size: int, with_traceback: bool = True) -> str:
        """The failure for a person who reads the output of one rank."""
        line = f"rank {self.rank} of {world_size} failed first: it {self.what}"
        if with_traceback and self.table:
            line = f"{line}\n{self.table}"
        if not with_traceback or not self.traceback:
            return line
        return f"{line}\n\n--- traceback of rank {self.rank}\n{self.traceback.rstrip()}\n--- end of rank {self.rank}'s traceback"


class RankFailure(RuntimeError):
    """Another rank failed first; the message holds its traceback.

    Attributes:
        failure: What happened, and on which rank.
    """

    def __init__(self, message: str, failure: Failure) -> None:
        super().__init__(message)
        self.failure = failure

    def __reduce__(self) -> tuple[type["RankFailure"], tuple[str, Failure]]:
        return type(self), (str(self), self.failure)


def _headline(error: BaseException) -> str:
    """Type and message; notes follow a traceback, they do not stand for it."""
    told = traceback.TracebackException.from_exception(error)
    told.__notes__ = None
    return list(told.format_exception_only())[-1].strip()


def is_lost_peer(error: BaseException) -> bool:
    """Whether `error` may merely say that another rank is gone."""
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST_PEER)

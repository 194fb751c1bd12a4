"""What an axis has sent: calls and bytes for each kind of collective."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "send", "all_to_all"]


@dataclass
class Traffic:
    """Counters of one engine on one rank, kept until :meth:`reset`.

    Bytes are those of the *whole* tensor that a collective works on (padded to a multiple of the ranks), whatever
    part of it travels: M for gathering or scattering M bytes. Tiny control messages (which parameters were used)
    are not counted. A ``"send"``, which is listed once there was one, has the bytes that go from this rank to one other, and
    an ``"all_to_all"``, likewise, all that a rank shares out.
    """

    calls: dict[str, int] = field(default_factory=lambda: {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0})
    bytes: dict[str, int] = field(default_factory=lambda: {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0})

    def add(self, kind: CollectiveKind, nbytes: int) -> None:
        """Counts one collective over ``nbytes`` bytes."""
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.bytes[kind] = self.bytes.get(kind, 0) + nbytes

    @property
    def volume(self) -> int:
        """Bytes in units in which a gather, a scatter, a send or an all-to-all of M bytes is M, and an all-reduce, being two, is 2M."""
        return sum(self.bytes.values()) + self.bytes["all_reduce"]

    def reset(self) -> None:
        """Sets every counter to zero."""
        for counter in (self.calls, self.bytes):
            counter.update(dict.fromkeys(counter, 0))

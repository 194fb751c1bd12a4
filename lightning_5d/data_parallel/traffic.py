"""What an axis has sent: calls and bytes for each kind of collective."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


def _nothing() -> dict[str, int]:
    return dict.fromkeys(get_args(CollectiveKind), 0)


@dataclass
class Traffic:
    """Counters of one engine on one rank, kept until :meth:`reset`.

    Bytes are those of the *whole* tensor that a collective works on (padded to a multiple of the ranks), whatever
    part of it travels: M for gathering or scattering M bytes, and for an all-to-all in which each rank has M bytes to
    share out. Tiny control messages (which parameters were used) are not counted.
    """

    calls: dict[str, int] = field(default_factory=_nothing)
    bytes: dict[str, int] = field(default_factory=_nothing)

    def add(self, kind: CollectiveKind, nbytes: int) -> None:
        """Counts one collective over ``nbytes`` bytes."""
        self.calls[kind] += 1
        self.bytes[kind] += nbytes

    @property
    def volume(self) -> int:
        """Bytes in units in which a gather, a scatter or an all-to-all of M bytes is M, and an all-reduce, being both, is 2M."""
        return sum(self.bytes.values()) + self.bytes["all_reduce"]

    def reset(self) -> None:
        """Sets every counter to zero."""
        for counter in (self.calls, self.bytes):
            counter.update(dict.fromkeys(counter, 0))

"""What the parameter groups of one engine share, and the order in which stage 3 gathers them.

[Note: walks]
A rank needs what every other rank sends of a group before it can use it, and no rank knows what the others use: one may
skip a block, take another branch, or have a loss that touches nothing. So gathers come in walks. A walk goes over the
groups in one order, the same on all ranks, and sends each of them exactly once, used here or not: one walk for each
forward of the root, front to back, and one for each backward, back to front and without the root, which stays whole
between the two. What is used is sent one group ahead; what was passed over is sent on the way; the rest is sent by
`finish`, one group at a time, so that nobody holds more than a few groups in the memory it exchanges through. A backward
that never came is walked before anything else is sent.

Nobody waits in a circle: a rank waits for a group only after it has sent it and all before it, so the rank that is
furthest behind finds all that it waits for. That holds because there is one walk over all groups, also where some are spread
over other ranks than the rest: with a walk for each, two ranks could wait for each other's next group of the other walk.
What comes after a group's only turn in a walk (a block called twice in one forward) is gathered on its own, and then all
ranks must do so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from lightning_5d.data_parallel.buffers import BufferPool
from lightning_5d.data_parallel.peers import Peers
from lightning_5d.data_parallel.traffic import Traffic


class Gathered(Protocol):
    """A group of parameters, as far as gathering it goes."""

    @property
    def arriving(self) -> bool:
        """Whether a gather is under way."""

    @property
    def is_unsharded(self) -> bool:
        """Whether this rank holds it whole."""

    @property
    def is_trained(self) -> bool:
        """Whether a backward may come."""

    def send(self) -> None:
        """Starts a gather, whatever this rank holds."""

    def discard_arrival(self) -> None:
        """Takes in a gather under way, if there is one, and drops it."""

    def forget_uses(self) -> None:
        """No backward is expected any more."""

    def forget_gathered(self) -> None:
        """The next use gathers, whatever the last one left in memory."""


class Walk:
    """Sends every one of ``groups`` once, in their order.

    Args:
        groups: What to send.
        ahead: How many groups are sent before they are reached.
        whole_too: Also those that this rank holds whole already, as the others may not.
    """

    def __init__(self, groups: Sequence[Gathered], ahead: int, whole_too: bool) -> None:
        self._groups, self._ahead, self._whole_too = groups, ahead, whole_too
        self._place = {id(group): place for place, group in enumerate(groups)}
        self._sent = 0
        self._under_way: list[Gathered] = []

    def reach(self, group: Gathered) -> None:
        """Sends up to ``group`` and those ahead of it, as far as not sent yet; what is not in the walk comes before it."""
        place = self._place.get(id(group), -1)
        while self._sent < min(place + 1 + self._ahead, len(self._groups)):
            self._send_next()

    def finish(self) -> None:
        """Sends the rest, and drops what this rank has not used."""
        for group in self._under_way:
            group.discard_arrival()
        self._under_way = []
        while self._sent < len(self._groups):
            self._send_next()
            while self._under_way:
                self._under_way.pop().discard_arrival()

    def _send_next(self) -> None:
        group = self._groups[self._sent]
        self._sent += 1
        if not group.arriving and (self._whole_too or not group.is_unsharded):
            group.send()
            self._under_way.append(group)


@dataclass
class Exchange:
    """What the parameter groups of one engine share.

    Attributes:
        peers: The ranks that groups are spread over; not the same for all of them.
        keep_unsharded: Stages 0 to 2: all groups are gathered before the forward, in one go, and stay whole.
        reuse: What was gathered last is still good if the shards have not been written to.
        whole: Every rank holds everything, for as long as the caller says; nothing is sent.
        of_root: How many of the groups, the first ones, are the root's.
    """

    peers: Sequence[Peers]
    traffic: Traffic
    results: BufferPool = field(default_factory=BufferPool)
    keep_unsharded: bool = False
    reuse: bool = False
    whole: bool = False
    of_root: int = 0
    groups: list[Gathered] = field(default_factory=list)
    _forward: Walk | None = None
    _backward: Walk | None = None
    _owed: bool = False

    @property
    def _walks(self) -> bool:
        return not self.keep_unsharded and not self.whole and any(peers.shard is not None for peers in self.peers)

    def begin_forward(self) -> None:
        """A forward of the root begins."""
        self.settle()
        self._forward = Walk(self.groups, 1, whole_too=True) if self._walks else None

    def finish_forward(self) -> None:
        """The root's forward is over."""
        if self._forward is None:
            return
        self._forward.finish()
        self._forward = None
        self._owed = torch.is_grad_enabled() and any(group.is_trained for group in self.groups)

    def reach(self, group: Gathered) -> None:
        """Sends up to ``group`` and one more, in the order of what is going on."""
        walk = self._backward or self._forward
        if walk is not None:
            walk.reach(group)

    def reach_backward(self, group: Gathered) -> None:
        """The same where a backward comes to ``group``, perhaps its first."""
        if self._backward is None:
            if self._walks:
                self._backward = self._back_to_front()
            elif self.keep_unsharded:
                # Whole unless an optimizer stepped in between, and then on all ranks: all at once, as in forward.
                self._backward = Walk(self.groups[::-1], len(self.groups), whole_too=False)
        self.reach(group)

    def finish_backward(self) -> None:
        """A backward is over."""
        if self._backward is not None:
            self._backward.finish()
            self._owed = False
        self._backward = None

    def settle(self) -> None:
        """Walks the backward that this rank did not have after its last forward: others may have had it."""
        if self._owed and self._walks:
            self._backward = self._back_to_front()
            self.finish_backward()
            for group in self.groups:
                group.forget_uses()
        self._owed = False

    def _back_to_front(self) -> Walk:
        return Walk(self.groups[self.of_root :][::-1], 1, whole_too=True)

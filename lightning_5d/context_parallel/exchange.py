"""How keys and values get from the rank that holds them to those that need them, and their gradients back."""

# [Note: straight from the owner]
# In a ring each rank passes on what it has received. Here hop h brings the block of the rank h places before, from that rank itself:
# every hop is as much traffic and as many messages as in a ring, each rank sends to one and receives from one, but a rank gets only
# the rows that its queries see, and a gradient goes home in one step, in the dtype in which a kernel made it, instead of travelling
# round and being added to on its way. So all sums are formed at home, in fp32, in the order of the hops.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_5d.context_parallel.tiles import Plan, Span
from lightning_5d.data_parallel.traffic import Traffic
from lightning_5d.data_parallel.transports import timeout_s_of

# Keeps these messages apart from a user's own on the same group, which default to tag 0.
_TAG = 0x5D2 << 16


class Block(NamedTuple):
    """Keys and values of one rank, or their gradients, (B, K, rows, D) each."""

    k: Tensor
    v: Tensor


class Lent(ABC):
    """The exchange of one call, in which every rank lends its block.

    Attributes:
        number: Of the call, the same on all ranks.
        own: This rank's block, as it is to be kept for the backward.
    """

    number: int
    own: Block

    def start(self, hop: int) -> None:  # noqa: B027 - where blocks are read in place there is nothing to start
        """Starts to bring the block of a hop, 1 to ``size - 1``. Called in order, each once."""

    @abstractmethod
    def take(self, hop: int) -> Block:
        """The rows of that hop's block which the plan needs. They may be read only."""

    def finish(self) -> None:  # noqa: B027
        """Waits until others have what they need of this rank's memory, where they do not say so themselves."""


class KeyValueExchange(ABC):
    """Moves blocks between the ranks of a group. All ranks make the same calls in the same order.

    Attributes:
        rank: This rank's place.
        size: Ranks.
        traffic: What this rank sends, to each reader.
        lasting: Whether blocks that were taken may be kept until the backward, and cost this rank no memory.
    """

    lasting: bool

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.traffic = Traffic()

    @abstractmethod
    def lend(self, k: Tensor, v: Tensor, plan: Plan) -> Lent:
        """Starts an exchange.

        Args:
            k: (B, K, s, D), this rank's keys.
            v: (B, K, s, D), its values.
            plan: What is needed by whom.
        """

    @abstractmethod
    def send_home(self, number: int, hop: int, grads: Block | None, rows: Span | None, like: Tensor) -> None:
        """Sends what a hop's block gets as gradients, and starts to receive what the own block gets in the same hop of another rank.

        Args:
            number: Of the call.
            hop: Whose block it is.
            grads: (B, K, rows, D) each, or ``None`` if it was not needed.
            rows: Of the own block, for which the rank `hop` places behind sends gradients; ``None`` if it sends none.
            like: The own keys.
        """

    @abstractmethod
    def come_home(self, number: int, hop: int, rows: Span, like: Tensor) -> Block:
        """What the rank `hop` places behind has sent home of these rows. May be read only."""

    def came_home(self) -> None:  # noqa: B027
        """Says that nothing of what came home is looked at any more."""

    def finish(self) -> None:  # noqa: B027
        """Waits until what was sent home has left."""

    def memory(self) -> Sequence[Tensor]:
        """See `ContextAttention.memory`."""
        return ()

    def mapped(self) -> Sequence[Tensor]:
        """See `ContextAttention.mapped`."""
        return ()

    def close(self) -> None:  # noqa: B027
        """Gives back what it holds."""

    def owner(self, hop: int) -> int:
        """Whose block a hop brings."""
        return (self.rank - hop) % self.size

    def reader(self, hop: int) -> int:
        """To whom a hop brings this rank's block."""
        return (self.rank + hop) % self.size


class GroupExchange(KeyValueExchange):
    """Sends and receives of the process group, between any hosts and accelerators.

    A block comes again in the backward, so that none has to be kept: a rank holds its own, the one that it computes with and the one
    that is on its way.

    Args:
        group: The ranks.
        device: Where their tensors are.
    """

    lasting = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._timeout = timedelta(seconds=timeout_s_of(group)) if device.type == "cpu" else None
        self._number = 0
        self._sent: list[tuple[dist.Work, Tensor, int]] = []
        self._homeward: dict[tuple[int, int], tuple[dist.Work | None, Tensor]] = {}
        if device.type != "cpu" and self.size > 1:
            # A communicator is made at the first message, by all ranks together; later not all of them may have one to send.
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    @override
    def lend(self, k: Tensor, v: Tensor, plan: Plan) -> Lent:
        self._number += 1
        return _Sent(self, self._number, Block(k, v), plan)

    @override
    def send_home(self, number: int, hop: int, grads: Block | None, rows: Span | None, like: Tensor) -> None:
        self.finish()
        packed = torch.stack([grads.k.to(like.dtype), grads.v.to(like.dtype)]) if grads else None
        arriving = None if rows is None else _empty(like, rows)
        work = self.swap(self.owner(hop), packed, self.reader(hop), arriving, 1)
        if arriving is not None:
            self._homeward[number, hop] = (work, arriving)

    @override
    def come_home(self, number: int, hop: int, rows: Span, like: Tensor) -> Block:
        work, arrived = self._homeward.pop((number, hop))
        self.wait(work, self.reader(hop))
        return Block(*arrived)

    @override
    def finish(self) -> None:
        while self._sent:
            work, _, peer = self._sent.pop()
            self.wait(work, peer)

    def swap(self, to: int, data: Tensor | None, source: int, into: Tensor | None, tag: int) -> dist.Work | None:
        """Sends to one rank and receives from another, together; returns the work of the receive."""
        operations: list[dist.P2POp] = []
        if data is not None:
            self.traffic.add("send", data.nbytes)
            operations.append(dist.P2POp(dist.isend, _bytes(data), group=self.group, group_peer=to, tag=_TAG + tag))
        if into is not None:
            operations.append(dist.P2POp(dist.irecv, _bytes(into), group=self.group, group_peer=source, tag=_TAG + tag))
        if not operations:
            return None
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:  # a peer that was gone before
            raise self._lost(error, *sorted({operation.group_peer for operation in operations})) from error
        if data is not None:
            # Where a batch is one work, that is the receive's too.
            self._sent.append((works[0], data, to))
        return works[-1] if into is not None else None

    def wait(self, work: dist.Work | None, peer: int) -> None:
        """Waits for a message."""
        if work is None:
            return
        try:
            work.wait() if self._timeout is None else work.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(error, peer) from error

    def _lost(self, error: RuntimeError, *peers: int) -> RuntimeError:
        return RuntimeError(
            f"Rank {self.rank} of the context axis waited for rank {' or '.join(map(str, peers))} of it, which is gone or did not"
            f" come to the same attention in time. Its own output may say why. ({error})"
        )


class _Sent(Lent):
    def __init__(self, exchange: GroupExchange, number: int, own: Block, plan: Plan) -> None:
        self._exchange, self.number, self.own, self._plan = exchange, number, own, plan
        self._arriving: dict[int, tuple[dist.Work | None, Tensor]] = {}

    @override
    def start(self, hop: int) -> None:
        exchange = self._exchange
        exchange.finish()
        owner, reader = exchange.owner(hop), exchange.reader(hop)
        serves, needs = self._plan.serves[reader], self._plan.needs[owner]
        data = None
        if serves is not None:
            data = torch.stack([x[:, :, serves[0] : serves[1]] for x in self.own])
        into = None if needs is None else _empty(self.own.k, needs)
        work = exchange.swap(reader, data, owner, into, 0)
        if into is not None:
            self._arriving[hop] = (work, into)

    @override
    def take(self, hop: int) -> Block:
        work, into = self._arriving.pop(hop)
        self._exchange.wait(work, self._exchange.owner(hop))
        return Block(*into)

    @override
    def finish(self) -> None:
        self._exchange.finish()


def _empty(like: Tensor, rows: Span) -> Tensor:
    batch, heads, _, size = like.shape
    return like.new_empty((2, batch, heads, rows[1] - rows[0], size))


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def open_exchange(group: dist.ProcessGroup, device: torch.device, *, shared_memory: bool = True) -> KeyValueExchange:
    """The fastest way between the ranks of a group; all of them call it.

    Args:
        group: The ranks.
        device: Where their tensors are.
        shared_memory: CPU ranks of one host read straight from each other's memory.
    """
    if device.type == "cpu" and shared_memory and group.size() > 1:
        from lightning_5d.context_parallel.host_exchange import HostExchange

        if (exchange := HostExchange.connect(group)) is not None:
            return exchange
    return GroupExchange(group, device)

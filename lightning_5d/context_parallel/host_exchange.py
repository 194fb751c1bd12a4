"""Keys and values between CPU ranks of one host, who compute with each other's where they are.

A rank copies its block into shared memory once, which then is what it keeps for the backward itself; the others read it there, in the
forward and again in the backward, and say when they are done. So there is one message per call and reader, and in the backward none:
a rank begins it with the blocks of the others, whose gradients are then at home before their owners ask for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_5d.context_parallel.exchange import Block, KeyValueExchange, Lent
from lightning_5d.context_parallel.tiles import Plan, Span
from lightning_5d.data_parallel.host_memory import HostMemory, Peer
from lightning_5d.data_parallel.transports import timeout_s_of

_BLOCKS, _GRADIENTS = 0, 1
# So many blocks of gradients may be on their way: with more, a rank whose owners are late would hold those of the whole sequence.
_HOMEWARD = 2


class HostExchange(KeyValueExchange):
    """The exchange in shared memory. Made by `connect`.

    Args:
        group: The ranks.
        host: Their memory.
    """

    lasting = True

    def __init__(self, group: dist.ProcessGroup, host: HostMemory) -> None:
        super().__init__(group)
        self._host = host
        # Whoever reads a block: so that one piece of memory serves them all in turn.
        self._peers = tuple(host.peers.values())
        self._number = 0
        self._homeward: deque[tuple[Tensor, Peer]] = deque()

    @classmethod
    def connect(cls, group: dist.ProcessGroup) -> HostExchange | None:
        """Connects all ranks of a group, or returns ``None`` on all of them if one cannot reach another this way."""
        host = HostMemory.connect(group, timeout_s_of(group), "context group")
        return None if host is None else cls(group, host)

    @override
    def lend(self, k: Tensor, v: Tensor, plan: Plan) -> Lent:
        number, self._number = self._number, self._number + 1
        readers = tuple(peer for rank, peer in self._host.peers.items() if plan.serves[rank] is not None)
        if not readers:
            return _Read(self, number, Block(k, v), plan)
        shared = self._host.allocate(2 * k.numel(), k.dtype, self._peers)
        own = Block(*shared.view(2, *k.shape))
        own.k.copy_(k)
        own.v.copy_(v)
        for peer in readers:
            start, stop = plan.serves[peer.rank] or (0, 0)
            self.traffic.add("send", shared.nbytes // k.shape[2] * (stop - start))
        self._host.publish(shared, _BLOCKS, number, self._peers, readers=readers)
        return _Read(self, number, own, plan)

    def read(self, number: int, owner: int, like: Tensor) -> Block:
        """The block of another rank, whole and where it is; that rank is told when the last tensor of it is gone."""
        memory = self._borrow(owner, _BLOCKS, number, 2 * like.nbytes)
        return Block(*memory.view(like.dtype).view(2, *like.shape))

    @override
    def send_home(self, number: int, hop: int, grads: Block | None, rows: Span | None, like: Tensor) -> None:
        if grads is None:
            return
        while len(self._homeward) >= _HOMEWARD:
            self._host.await_read(*self._homeward.popleft())
        peer = self._host.peers[self.owner(hop)]
        shared = self._host.allocate(2 * grads.k.numel(), like.dtype, self._peers)
        both = shared.view(2, *grads.k.shape)
        both[0].copy_(grads.k)
        both[1].copy_(grads.v)
        self.traffic.add("send", shared.nbytes)
        self._host.publish(shared, _GRADIENTS, number, self._peers, readers=(peer,))
        self._homeward.append((shared, peer))

    @override
    def come_home(self, number: int, hop: int, rows: Span, like: Tensor) -> Block:
        batch, heads, _, size = like.shape
        shape = (2, batch, heads, rows[1] - rows[0], size)
        nbytes = 2 * like.nbytes // like.shape[2] * (rows[1] - rows[0])
        return Block(*self._borrow(self.reader(hop), _GRADIENTS, number, nbytes).view(like.dtype).view(shape))

    @override
    def came_home(self) -> None:
        self._host.receive(0.0)

    @override
    def memory(self) -> Sequence[Tensor]:
        return self._host.memory()

    @override
    def mapped(self) -> Sequence[Tensor]:
        return self._host.mapped()

    @override
    def close(self) -> None:
        self._homeward.clear()
        self._host.close()

    def _borrow(self, rank: int, tag: int, number: int, nbytes: int) -> Tensor:
        memory = self._host.borrow(self._host.peers[rank], tag, number)
        if memory.numel() != nbytes:
            raise RuntimeError(
                f"Rank {rank} of the context axis sent {memory.numel()} bytes where rank {self.rank} expected {nbytes}: its ranks have"
                " to run the same modules on parts of the same batch."
            )
        return memory


class _Read(Lent):
    def __init__(self, exchange: HostExchange, number: int, own: Block, plan: Plan) -> None:
        self._exchange, self.number, self.own, self._plan = exchange, number, own, plan

    @override
    def take(self, hop: int) -> Block:
        owner = self._exchange.owner(hop)
        rows = self._plan.needs[owner]
        block = self._exchange.read(self.number, owner, self.own.k)
        return block if rows is None else Block(*(x[:, :, rows[0] : rows[1]] for x in block))

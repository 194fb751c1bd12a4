"""Exchanges between ranks of one host: data stays where it is in shared memory, sockets only say that it is there.

[Note: who may touch a block, and when]
A block is one piece of shared memory that its owner writes and its peers map. The owner gets it from ``allocate``,
fills it, and tells every peer READY; from then on it must not write to it. A peer reads it and answers DONE. The owner
reuses the block when all peers have said DONE *and* no tensor of its own refers to it any more; the second is seen by
the end of the buffer object under those tensors. So neither side needs to allocate in the same order as the other.

Signals travel over Unix sockets, not as flags in memory: a peer that dies closes its sockets, which ends any wait at
once, a wait costs no processor time, and the kernel orders memory on every processor. Blocks are memory files without
a name, passed over those sockets: nothing to clean up after a crash, and no size limit of a mounted /dev/shm.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_5d.data_parallel.buffers import Buffer, in_pages
from lightning_5d.data_parallel.transport import Arrival, Transport

_READY, _DONE, _BLOCK = range(3)
# kind, tag, sequence number within the tag, block number, bytes
_MESSAGE = struct.Struct("<BxxxIQQQ")
_HANDSHAKE_S = 20.0
# Apart from the tags of gathers and reductions.
_AGREEMENT_TAG = (1 << 20) - 3
# A block serves exchanges down to this part of its size.
_ROOMY = 4

_open_transports: weakref.WeakSet[SharedMemory] = weakref.WeakSet()


def _drop_sockets_after_fork() -> None:
    # A data-loading worker that holds a copy of a socket would hide its parent's death from the peers.
    for transport in list(_open_transports):
        transport.drop_sockets()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_sockets_after_fork)


class _Block(Buffer):
    """A piece of this rank's shared memory."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.fd = os.memfd_create("lightning-5d", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.fd, 0, nbytes)  # a full machine is an error here, not a SIGBUS later
            super().__init__(mmap.mmap(self.fd, nbytes))
        except OSError:
            os.close(self.fd)
            raise
        self.readers = 0

    @property
    def free(self) -> bool:
        return not self.lent and not self.readers


class _Peer:
    """The connection to one other rank, and that rank's blocks."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.connection = rank, connection
        self.blocks: dict[int, torch.Tensor] = {}
        self.ready: dict[tuple[int, int], tuple[int, int]] = {}
        self.unsent: deque[bytes] = deque()
        self.gone = False


class _Reading(Arrival):
    """Exchange ``number`` of ``tag``: this rank has ``sent`` a buffer and reads ``own`` and its share of the others'.

    ``share_of(peer)`` is the place of this rank's share in a buffer of that peer, in shares; None for all of it.
    """

    def __init__(
        self,
        transport: SharedMemory,
        sent: torch.Tensor,
        own: torch.Tensor,
        tag: int,
        number: int,
        share_of: Callable[[int], int] | None,
    ) -> None:
        self._transport, self._tag, self._number = transport, tag, number
        self._sent, self._own, self._share_of = sent, own, share_of
        self._missing = list(transport.peers)
        self._parts: list[torch.Tensor | None] = [None] * transport.size
        self._read: list[tuple[_Peer, int]] = []

    def ready(self) -> bool:
        self._transport.receive(0.0)
        return all((self._tag, self._number) in peer.ready for peer in self._missing)

    def wait(self) -> Sequence[torch.Tensor]:
        sent, rank = self._sent, self._transport.rank
        bytes_sent = sent.numel() * sent.itemsize
        while self._missing:
            peer = self._missing[-1]
            number, nbytes = self._transport.await_ready(peer, self._tag, self._number)
            self._missing.pop()
            if nbytes != bytes_sent:
                raise RuntimeError(
                    f"Rank {peer.rank} sent {nbytes} bytes where rank {rank} expected {bytes_sent}: "
                    "the ranks of a data group must hold the same parameters."
                )
            theirs = peer.blocks[number][:nbytes].view(sent.dtype)
            if self._share_of is not None:
                theirs = theirs.narrow(0, self._share_of(peer.rank) * self._own.numel(), self._own.numel())
            self._parts[peer.rank] = theirs
            self._read.append((peer, number))
        self._parts[rank] = self._own
        return [part for part in self._parts if part is not None]

    def release(self) -> None:
        self._parts = []
        for peer, number in self._read:
            self._transport.send(peer, _MESSAGE.pack(_DONE, 0, 0, number, 0), can_wait=True)
        self._read = []


class SharedMemory(Transport):
    """Ranks of one host read straight from each other's memory. Made by :meth:`connect`."""

    can_poll = True

    def __init__(self, group: dist.ProcessGroup, connections: dict[int, socket.socket], timeout_s: float) -> None:
        super().__init__(group)
        self.peers = [_Peer(rank, connections[rank]) for rank in sorted(connections)]
        self._timeout_s = timeout_s
        self._poll = select.poll()
        self._by_fd: dict[int, _Peer] = {}
        for peer in self.peers:
            peer.connection.setblocking(False)
            peer.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            self._by_fd[peer.connection.fileno()] = peer
            self._poll.register(peer.connection, select.POLLIN)
        self._blocks: list[_Block] = []
        self._by_address: dict[int, _Block] = {}
        self._sequence: dict[int, int] = {}
        _open_transports.add(self)

    @classmethod
    def connect(cls, group: dist.ProcessGroup, timeout_s: float) -> SharedMemory | None:
        """Connects all ranks of ``group``, or returns None on all of them if one cannot reach another this way."""
        connections: dict[int, socket.socket] | None
        listener = _listen()
        names: list[str | None] = [None] * group.size()
        name = None if listener is None else listener.getsockname()
        dist.all_gather_object(names, name, group=group)
        try:
            if listener is None or None in names:
                raise OSError("a rank has no Unix sockets or no memory files")
            connections = _meet(listener, names, group.rank())
        except OSError:
            connections = None
        finally:
            if listener is not None:
                listener.close()
        connected = torch.tensor([int(connections is not None)])
        dist.all_reduce(connected, dist.ReduceOp.MIN, group=group)
        if connections is None or not connected.item():
            for connection in (connections or {}).values():
                connection.close()
            return None
        return cls(group, connections, timeout_s)

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See :meth:`Transport.allocate`. The memory is reused once this rank and its peers are done with it."""
        size = in_pages(numel * dtype.itemsize)
        block = self._find_free(size)
        if block is None:
            self.receive(0.0)  # a DONE may be waiting
            block = self._find_free(size)
        if block is None:
            block = self._new_block(size)
        whole = block.lend()
        self._by_address[whole.data_ptr()] = block
        return whole[: numel * dtype.itemsize].view(dtype)

    def _find_free(self, size: int) -> _Block | None:
        # The smallest that is large enough, so that exchanges of different sizes use the same memory in turn.
        fitting = (block for block in self._blocks if size <= block.nbytes <= _ROOMY * size and block.free)
        return min(fitting, key=lambda block: block.nbytes, default=None)

    def share(self, buffer: torch.Tensor, tag: int) -> Arrival:
        """See :meth:`Transport.share`."""
        buffer, number = self._publish(buffer, tag)
        return _Reading(self, buffer, buffer, tag, number, None)

    def scatter(self, buffer: torch.Tensor, tag: int, own: torch.Tensor | None = None) -> Arrival:
        """See :meth:`Transport.scatter`."""
        buffer, number = self._publish(buffer, tag)
        rank = self.rank
        if own is None:
            return _Reading(self, buffer, buffer.chunk(self.size)[rank], tag, number, lambda peer: rank)
        return _Reading(self, buffer, own, tag, number, lambda peer: rank - (rank > peer))

    @override
    def agree(self, flags: torch.Tensor) -> None:
        """See :meth:`Transport.agree`."""
        arrival = self.share(self.allocate(flags.numel(), flags.dtype).copy_(flags), _AGREEMENT_TAG)
        for part in arrival.wait():
            torch.maximum(flags, part, out=flags)
        arrival.release()

    def memory(self) -> list[torch.Tensor]:
        """See :meth:`Transport.memory`."""
        return [block.view() for block in self._blocks]

    def mapped(self) -> list[torch.Tensor]:
        """See :meth:`Transport.mapped`."""
        return [block for peer in self.peers for block in peer.blocks.values()]

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        self.drop_sockets()
        self._blocks.clear()
        self._by_address.clear()

    def drop_sockets(self) -> None:
        """Closes the connections; every later exchange fails."""
        _open_transports.discard(self)
        for peer in self.peers:
            peer.gone = True
            peer.connection.close()

    def _publish(self, buffer: torch.Tensor, tag: int) -> tuple[torch.Tensor, int]:
        """Tells every peer that ``buffer`` is there; returns what was sent, and its number within the tag."""
        block = self._by_address.get(buffer.data_ptr())
        if block is None or block.readers:
            copy = self.allocate(buffer.numel(), buffer.dtype)
            copy.copy_(buffer)
            return self._publish(copy, tag)
        number = self._sequence.get(tag, 0)
        self._sequence[tag] = number + 1
        block.readers = len(self.peers)
        message = _MESSAGE.pack(_READY, tag, number, block.number, buffer.numel() * buffer.itemsize)
        for peer in self.peers:
            self.send(peer, message)
        return buffer, number

    def _new_block(self, size: int) -> _Block:
        try:
            block = _Block(len(self._blocks), size)
        except OSError as error:
            held = sum(block.nbytes for block in self._blocks)
            raise MemoryError(
                f"No room for {size} more bytes of shared memory; this rank holds {held} already ({error}). "
                "Smaller blocks or a higher ZeRO stage need less."
            ) from error
        self._blocks.append(block)
        for peer in self.peers:
            self.send(peer, _MESSAGE.pack(_BLOCK, 0, 0, block.number, size), block.fd)
        os.close(block.fd)
        return block

    # Signals #
    def send(self, peer: _Peer, message: bytes, fd: int | None = None, can_wait: bool = False) -> None:
        """Sends one message. If the peer's inbox is full, one that ``can_wait`` goes with a later one instead.

        That a block is done can wait: its owner takes another one meanwhile. So a rank that is elsewhere, in a barrier
        say, never holds up those that have merely finished reading. A peer that is gone is noticed by who waits for it.
        """
        if can_wait:
            peer.unsent.append(message)
            self._flush(peer)
            return
        give_up = time.monotonic() + self._timeout_s
        while not peer.gone:
            try:
                if fd is None:
                    peer.connection.send(message)
                else:
                    socket.send_fds(peer.connection, [message], [fd])
                return
            except BlockingIOError:
                # Its inbox is full. It may be in here itself, waiting for room in ours: make room.
                self.receive(0.001)
                if time.monotonic() > give_up:
                    raise self._timeout(peer) from None
            except (BrokenPipeError, ConnectionResetError):
                self._take_in(peer)  # what it said before it went; ends with the end of the connection

    def _flush(self, peer: _Peer) -> None:
        try:
            while peer.unsent and not peer.gone:
                peer.connection.send(peer.unsent[0])
                peer.unsent.popleft()
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            self._take_in(peer)

    def await_ready(self, peer: _Peer, tag: int, number: int) -> tuple[int, int]:
        """Blocks until ``peer`` has published exchange ``number`` of ``tag``; returns its block and the bytes in it."""
        give_up = time.monotonic() + self._timeout_s
        while (found := peer.ready.pop((tag, number), None)) is None:
            if peer.gone:
                raise RuntimeError(
                    f"Rank {peer.rank} of the data group is gone: it ended, or closed its engine, while rank "
                    f"{self.rank} still waited for it. Its own output says why."
                )
            left = give_up - time.monotonic()
            if left <= 0:
                raise self._timeout(peer)
            self.receive(min(left, 1.0))
        return found

    def receive(self, timeout_s: float) -> None:
        """Takes in what has been said, waiting up to ``timeout_s`` for something."""
        for peer in self.peers:
            if peer.unsent:
                self._flush(peer)
        for fd, _ in self._poll.poll(timeout_s * 1000):
            self._take_in(self._by_fd[fd])

    def _take_in(self, peer: _Peer) -> None:
        while not peer.gone:
            try:
                data, fds, _, _ = socket.recv_fds(peer.connection, _MESSAGE.size, 1)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it closed without reading all of ours; what it had sent before is still to be read
            if not data:
                self._lose(peer)
                return
            kind, tag, number, block, nbytes = _MESSAGE.unpack(data)
            if kind == _READY:
                peer.ready[tag, number] = (block, nbytes)
            elif kind == _DONE:
                self._blocks[block].readers -= 1
            else:
                peer.blocks[block] = torch.frombuffer(mmap.mmap(fds[0], nbytes), dtype=torch.uint8)
                os.close(fds[0])

    def _lose(self, peer: _Peer) -> None:
        peer.gone = True
        self._poll.unregister(peer.connection)

    def _timeout(self, peer: _Peer) -> RuntimeError:
        return RuntimeError(
            f"Rank {self.rank} has waited {self._timeout_s:.0f} s for rank {peer.rank} of the data group, "
            "which is alive but has not come to the same exchange. Do all ranks take the same steps?"
        )


def _listen() -> socket.socket | None:
    """A socket under a fresh name that only this host (more exactly: this network namespace) can reach."""
    if not hasattr(os, "memfd_create") or not hasattr(socket, "AF_UNIX"):
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0lightning-5d-" + secrets.token_hex(16))
    listener.listen(1024)
    return listener


def _meet(listener: socket.socket, names: Sequence[str | bytes | None], rank: int) -> dict[int, socket.socket]:
    """Connects to every lower rank and is connected to by every higher one."""
    connections: dict[int, socket.socket] = {}
    try:
        for lower in range(rank):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connections[lower] = connection
            connection.settimeout(_HANDSHAKE_S)
            connection.connect(names[lower])  # type: ignore[arg-type]
            connection.send(struct.pack("<I", rank))
        listener.settimeout(_HANDSHAKE_S)
        while len(connections) < len(names) - 1:
            connection, _ = listener.accept()
            connection.settimeout(_HANDSHAKE_S)
            connections[struct.unpack("<I", connection.recv(4))[0]] = connection
    except (OSError, struct.error) as error:
        for connection in connections.values():
            connection.close()
        raise OSError(str(error)) from error
    return connections

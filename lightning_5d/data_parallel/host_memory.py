"""Memory that ranks of one host lend each other: data stays where it is, sockets only say that it is there.

[Note: who may touch a block, and when]
A block is one piece of shared memory that its owner writes and its peers map. The owner gets it from ``allocate``,
fills it, and tells its readers READY; from then on it must not write to it. A peer reads it and answers DONE. The owner
reuses the block when all readers have said DONE *and* no tensor of its own refers to it any more; the second is seen by
the end of the buffer object under those tensors. So neither side needs to allocate in the same order as the other.

Signals travel over Unix sockets, not as flags in memory: a peer that dies closes its sockets, which ends any wait at
once, a wait costs no processor time, and the kernel orders memory on every processor. Blocks are memory files without
a name, passed over those sockets: nothing to clean up after a crash, and no size limit of a mounted /dev/shm.

Each packet may wake its reader, which costs more than all that is in it: so what waits to be said goes in one. What nobody waits for, that a
block is done, and numbers that are of no use before what comes with them, can be left for the next packet.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_5d.data_parallel.buffers import Buffer, in_pages

_T = TypeVar("_T")

_READY, _DONE, _BLOCK, _SAID = range(4)
# kind, tag, sequence number within the tag, block number, bytes
_MESSAGE = struct.Struct("<BxxxIQQQ")
_PACKET = 1 << 16
_HANDSHAKE_S = 20.0
_RETRY_S = 0.001
# A block serves exchanges down to this part of its size.
_ROOMY = 4

_open: weakref.WeakSet[HostMemory] = weakref.WeakSet()


def _drop_sockets_after_fork() -> None:
    # A data-loading worker that holds a copy of a socket would hide its parent's death from the peers.
    for memory in list(_open):
        memory.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_sockets_after_fork)


class Block(Buffer):
    """A piece of this rank's memory.

    Attributes:
        audience: The peers that may read it.
        readers: How many of them have not said yet that they are done with it.
    """

    def __init__(self, number: int, nbytes: int, audience: tuple[Peer, ...]) -> None:
        self.number, self.audience = number, audience
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
        """Whether it may be written again."""
        return not self.lent and not self.readers


class _Borrowed(Buffer):
    """A block of a peer, who is told when the last tensor of a loan is gone."""

    def __init__(self, memory: mmap.mmap, number: int, peer: Peer) -> None:
        super().__init__(memory)
        self._number, self._peer = number, peer

    @override
    def lend(self, numel: int = -1, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        lent = super().lend(numel, dtype)
        if self._loan is not None and (loan := self._loan()) is not None:
            weakref.finalize(loan, self._take_back).atexit = False
        return lent

    def _take_back(self) -> None:
        # Only noted, for it may come in the middle of anything: the garbage collector decides.
        self._peer.unsent.append((_MESSAGE.pack(_DONE, 0, 0, self._number, 0), None))


class Peer:
    """The connection to one other rank, and that rank's blocks.

    Attributes:
        rank: The other rank's place in the group.
        blocks: Its blocks, by number.
        gone: It has ended, or closed the connection.
    """

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.connection = rank, connection
        self.blocks: dict[int, Buffer] = {}
        self.ready: dict[tuple[int, int], tuple[int, int]] = {}
        self.said: dict[tuple[int, int], bytes] = {}
        self.unsent: deque[tuple[bytes, int | None]] = deque()
        self.gone = False

    @property
    def owed(self) -> bool:
        """Whether something has not been said yet that the other one may wait for."""
        return any(message[0] != _DONE for message, _ in self.unsent)

    def forget(self) -> None:
        """Drops what has not been said."""
        while self.unsent:
            _, fd = self.unsent.popleft()
            if fd is not None:
                os.close(fd)


class HostMemory:
    """One rank's memory and its connections to all other ranks of a group. Made by `connect`.

    Args:
        rank: This rank's place in the group.
        connections: To every other rank.
        timeout_s: The longest wait for one.
        group_name: What the group is called in errors.
    """

    def __init__(self, rank: int, connections: dict[int, socket.socket], timeout_s: float, group_name: str) -> None:
        self.rank = rank
        self.peers = {peer: Peer(peer, connections[peer]) for peer in sorted(connections)}
        self._timeout_s, self._group_name = timeout_s, group_name
        self._poll = select.poll()
        self._by_fd: dict[int, Peer] = {}
        for peer in self.peers.values():
            peer.connection.setblocking(False)
            peer.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            self._by_fd[peer.connection.fileno()] = peer
            self._poll.register(peer.connection, select.POLLIN)
        self.blocks: list[Block] = []
        self._by_address: dict[int, Block] = {}
        _open.add(self)

    @classmethod
    def connect(cls, group: dist.ProcessGroup, timeout_s: float, group_name: str) -> Self | None:
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
        return cls(group.rank(), connections, timeout_s, group_name)

    def allocate(self, numel: int, dtype: torch.dtype, audience: tuple[Peer, ...]) -> torch.Tensor:
        """Memory (uninitialised, 1-D) to publish; it is reused once this rank and all of its audience are done with it."""
        size = in_pages(numel * dtype.itemsize)
        block = self._find_free(size, audience)
        if block is None:
            self.receive(0.0)  # a DONE may be waiting
            block = self._find_free(size, audience)
        if block is None:
            block = self._new_block(size, audience)
        return block.lend(numel, dtype)

    def _find_free(self, size: int, audience: tuple[Peer, ...]) -> Block | None:
        # The smallest that is large enough, so that exchanges of different sizes use the same memory in turn.
        fitting = (
            block
            for block in self.blocks
            if size <= block.nbytes <= _ROOMY * size and block.free and block.audience == audience
        )
        return min(fitting, key=lambda block: block.nbytes, default=None)

    def publish(
        self,
        buffer: torch.Tensor,
        tag: int,
        number: int,
        audience: tuple[Peer, ...],
        *,
        readers: tuple[Peer, ...] | None = None,
        at_once: bool = True,
    ) -> torch.Tensor:
        """Tells peers that ``buffer`` is there to be read, as message ``number`` of ``tag``.

        Args:
            buffer: The memory.
            tag: Messages of other tags have numbers of their own.
            number: The message's.
            audience: Those for whom the memory is.
            readers: Those of them who are told, and will read it; all, if not given.
            at_once: Returns when they have been told, for which their inboxes need room. Else that may come with any later
                call, and with `settle` for certain.

        Returns:
            What they will read: ``buffer`` itself if `allocate` has made it for them and nobody reads it yet, else a copy.
        """
        if not self.is_ready(buffer, audience):
            copy = self.allocate(buffer.numel(), buffer.dtype, audience)
            copy.copy_(buffer)
            return self.publish(copy, tag, number, audience, readers=readers, at_once=at_once)
        block = self._by_address[buffer.data_ptr()]
        readers = audience if readers is None else readers
        block.readers = len(readers)
        message = _MESSAGE.pack(_READY, tag, number, block.number, buffer.numel() * buffer.itemsize)
        for peer in readers:
            peer.unsent.append((message, None))
            self._flush(peer)
        if at_once:
            self.settle(readers)
        return buffer

    def is_ready(self, buffer: torch.Tensor, audience: tuple[Peer, ...]) -> bool:
        """Whether `publish` takes ``buffer`` as it is: `allocate` has made it for those peers, and nobody reads it yet."""
        block = self._by_address.get(buffer.data_ptr())
        return block is not None and not block.readers and block.audience == audience

    def await_read(self, buffer: torch.Tensor, reader: Peer) -> None:
        """Waits until what was published has been read by its only reader. One that is gone will not."""
        block = self._by_address[buffer.data_ptr()]
        give_up = time.monotonic() + self._timeout_s
        while block.readers and not reader.gone:
            left = give_up - time.monotonic()
            if left <= 0:
                raise self._timeout(reader)
            self.receive(min(left, 1.0))

    def borrow(self, peer: Peer, tag: int, number: int) -> torch.Tensor:
        """Waits for message ``number`` of ``tag``; returns its bytes where they are.

        They belong to the caller, if this rank is the only reader; else they may be read only. The peer is told that they have been read
        when no tensor refers to them any more.
        """
        block, nbytes = self.await_ready(peer, tag, number)
        return peer.blocks[block].lend(nbytes)

    def done(self, peer: Peer, number: int, *, at_once: bool = True) -> None:
        """Tells a peer that its block has been read; at once, or with the next packet that it gets."""
        peer.unsent.append((_MESSAGE.pack(_DONE, 0, 0, number, 0), None))
        if at_once:
            self._flush(peer)

    def say(self, data: bytes, tag: int, number: int, audience: tuple[Peer, ...]) -> None:
        """Tells peers a few bytes, as message ``number`` of ``tag``, with the next packet that each of them gets; `settle` makes sure of it.

        Raises:
            ValueError: If they do not fit into a packet.
        """
        if len(data) > _PACKET - _MESSAGE.size:
            raise ValueError(f"{len(data)} bytes do not fit into a packet of {_PACKET}.")
        message = _MESSAGE.pack(_SAID, tag, number, 0, len(data)) + data
        for peer in audience:
            peer.unsent.append((message, None))

    def tell(self, peers: Iterable[Peer]) -> None:
        """Says at once what waits to be said."""
        waiting = [peer for peer in peers if peer.unsent]
        for peer in waiting:
            self._flush(peer)
        self.settle(waiting)

    def await_said(self, peer: Peer, tag: int, number: int) -> bytes:
        """Blocks until ``peer`` has said message ``number`` of ``tag``; returns it."""
        return self._await(peer, peer.said, tag, number)

    def memory(self) -> list[torch.Tensor]:
        """The memory that this rank keeps for reuse, lent or not."""
        return [block.view() for block in self.blocks]

    def mapped(self) -> list[torch.Tensor]:
        """The memory of its peers that this rank reads in place."""
        return [block.view() for peer in self.peers.values() for block in peer.blocks.values()]

    def close(self) -> None:
        """Closes the connections, so that every later exchange fails, and gives memory back that nobody looks at."""
        _open.discard(self)
        for peer in self.peers.values():
            peer.gone = True
            peer.connection.close()
            peer.blocks.clear()
            peer.forget()
        self.blocks.clear()
        self._by_address.clear()

    def _new_block(self, size: int, audience: tuple[Peer, ...]) -> Block:
        try:
            block = Block(len(self.blocks), size, audience)
        except OSError as error:
            held = sum(block.nbytes for block in self.blocks)
            raise MemoryError(
                f"No room for {size} more bytes of memory that rank {self.rank} of the {self._group_name} shares with others; it holds {held} already"
                f" ({error}). Fewer tokens in a microbatch, smaller blocks or a higher ZeRO stage need less."
            ) from error
        self.blocks.append(block)
        self._by_address[block.view().data_ptr()] = block
        for peer in audience:
            peer.unsent.append((_MESSAGE.pack(_BLOCK, 0, 0, block.number, size), os.dup(block.fd)))
        os.close(block.fd)
        return block

    # Signals

    def settle(self, peers: Iterable[Peer]) -> None:
        """Waits until all that was published for peers has been said. One that is gone is noticed by who waits for it.

        That a block is done can wait: its owner takes another one meanwhile. So a rank that is elsewhere, in a barrier
        say, never holds up those that have merely finished reading.
        """
        give_up = time.monotonic() + self._timeout_s
        for peer in peers:
            while peer.owed and not peer.gone:
                # Its inbox is full. It may be in here itself, waiting for room in ours: make room.
                self.receive(0.001)
                if time.monotonic() > give_up:
                    raise self._timeout(peer)

    def _flush(self, peer: Peer) -> None:
        """Says what there is to say, as far as the peer's inbox has room."""
        try:
            while peer.unsent and not peer.gone:
                fd = peer.unsent[0][1]
                messages: list[bytes] = []
                size = 0
                for message, other in peer.unsent:
                    size += len(message)
                    if messages and (other is not None or size > _PACKET):
                        break
                    messages.append(message)
                packet = b"".join(messages)
                if fd is None:
                    peer.connection.send(packet)
                else:
                    socket.send_fds(peer.connection, [packet], [fd])
                    os.close(fd)
                for _ in messages:
                    peer.unsent.popleft()
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            self._take_in(peer)  # what it said before it went; ends with the end of the connection
        except OSError as error:
            # The kernel limits how many files of a user may be on their way; those get there like others in a full inbox.
            if error.errno != errno.ETOOMANYREFS:
                raise

    def await_ready(self, peer: Peer, tag: int, number: int) -> tuple[int, int]:
        """Blocks until ``peer`` has published exchange ``number`` of ``tag``; returns its block and the bytes in it."""
        return self._await(peer, peer.ready, tag, number)

    def _await(self, peer: Peer, arrived: dict[tuple[int, int], _T], tag: int, number: int) -> _T:
        if (found := arrived.pop((tag, number), None)) is not None:
            return found
        give_up = time.monotonic() + self._timeout_s
        while (found := arrived.pop((tag, number), None)) is None:
            if peer.gone:
                raise RuntimeError(
                    f"Rank {peer.rank} of the {self._group_name} is gone: it ended, or closed its connections, while rank "
                    f"{self.rank} still waited for it. Its own output says why."
                )
            left = give_up - time.monotonic()
            if left <= 0:
                raise self._timeout(peer)
            self.receive(min(left, 1.0))
        return found

    def receive(self, timeout_s: float) -> None:
        """Takes in what has been said, waiting up to ``timeout_s`` for something."""
        for peer in self.peers.values():
            if peer.unsent and not peer.gone:
                self._flush(peer)
                if peer.gone:
                    timeout_s = 0.0  # what it had said before has been taken in, and may be what is waited for
                elif peer.owed:
                    timeout_s = min(timeout_s, _RETRY_S)
        for fd, _ in self._poll.poll(timeout_s * 1000):
            # Who waits asks again if it was not the packet that it waits for; to find that there is no other costs as much as to read one.
            self._take_in(self._by_fd[fd], one=timeout_s > 0)

    def _take_in(self, peer: Peer, one: bool = False) -> None:
        while not peer.gone:
            try:
                data, fds, _, _ = socket.recv_fds(peer.connection, _PACKET, 1)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it closed without reading all of ours; what it had sent before is still to be read
            if not data:
                self._lose(peer)
                return
            start = 0
            while start < len(data):
                kind, tag, number, block, nbytes = _MESSAGE.unpack_from(data, start)
                start += _MESSAGE.size
                if kind == _READY:
                    peer.ready[tag, number] = (block, nbytes)
                elif kind == _DONE:
                    self.blocks[block].readers -= 1
                elif kind == _SAID:
                    peer.said[tag, number] = data[start : start + nbytes]
                    start += nbytes
                else:
                    peer.blocks[block] = _Borrowed(mmap.mmap(fds[0], nbytes), block, peer)
                    os.close(fds[0])
            if one:
                return

    def _lose(self, peer: Peer) -> None:
        peer.gone = True
        self._poll.unregister(peer.connection)

    def _timeout(self, peer: Peer) -> RuntimeError:
        return RuntimeError(
            f"Rank {self.rank} has waited {self._timeout_s:.0f} s for rank {peer.rank} of the {self._group_name}, "
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

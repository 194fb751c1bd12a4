"""The key-value store through which the ranks of a job find each other."""

import errno
import os
import socket
from dataclasses import dataclass, field
from datetime import timedelta

from lightning.fabric.utilities.exceptions import MisconfigurationException

# `torch.distributed` has these too, but not for a type checker. Checked with torch 2.13.
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

__all__ = [
    "HashStore",
    "PrefixStore",
    "Rendezvous",
    "Store",
    "TCPStore",
    "bind",
    "default_store",
    "listen",
    "second_connection",
    "serve",
]

_LOCAL = ("127.0.0.1", "localhost", "::1")
_CONNECT_TIMEOUT = timedelta(minutes=5)
_BACKLOG = 4096


@dataclass
class Rendezvous:
    """A job's store, and this process's place in the job.

    Attributes:
        host, port: Where the store listens; port 0 when there is one rank and nothing to find.
        rank, world_size: Of this process.
        hosting: The server, in the process that hosts it.
    """

    host: str
    port: int
    rank: int
    world_size: int
    hosting: Store | None = None
    _store: Store | None = field(default=None, repr=False)

    def client(self) -> Store:
        """A new connection."""
        if self.port == 0:
            self._store = self._store or HashStore()
            return self._store
        return TCPStore(self.host, self.port, is_master=False, timeout=_CONNECT_TIMEOUT)

    def next_generation(self) -> PrefixStore:
        """A view of the store that no earlier run of this job has written to; each rank calls it equally often.

        Keys of a finished run would otherwise be read by the next one: gloo would connect to closed ports.
        """
        if self._store is None:
            self._store = self.client()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        number = self._store.add(f"fived/{attempt}/generation/{self.rank}", 1)
        return PrefixStore(f"fived/{attempt}/{number}", self._store)


def listen(host: str, port: int) -> tuple[Store, int]:
    """Starts the server of a store.

    Args:
        host: Address of this machine; a loopback address makes the store unreachable from others.
        port: 0 for any free one.

    Returns:
        The store, and the port it listens on.

    Raises:
        MisconfigurationException: If something else listens on `port`.
    """
    server = bind(host, port)
    port = server.getsockname()[1]
    return serve(host, server), port


def bind(host: str, port: int) -> socket.socket:
    """The first half of `listen`: a socket that is handed to the store's server later.

    The port belongs to this job from the moment it is chosen: there is no time in which another job can take it.
    """
    try:
        if host in _LOCAL:
            family = socket.AF_INET6 if host == "::1" else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=_BACKLOG)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
        return socket.create_server(("", port), backlog=_BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise MisconfigurationException(
            f"Port {port} (MASTER_PORT) on {host} is in use, by another job or one that has not ended. Set MASTER_PORT to a"
            " free port; for a run on one machine leave it unset, and a free one is chosen."
        ) from error


def serve(host: str, server: socket.socket) -> Store:
    """The second half of `listen`: starts the server, which is a thread. Who has connected meanwhile is served then."""
    port = server.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())


def default_store() -> Store:
    """The store of the process group that is already there."""
    from torch.distributed.distributed_c10d import _get_default_store  # checked with torch 2.13

    return PrefixStore("fived", _get_default_store())


def second_connection(store: PrefixStore) -> PrefixStore:
    """The same keys through a connection of its own, for another thread: a wait on one would block the other."""
    clone: PrefixStore = store.clone()  # type: ignore[attr-defined]
    return clone

"""A server that forks warm processes, as its owner sees it."""

import os
import pickle
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 240.0


@dataclass(frozen=True)
class Script:
    """A program to become: `arguments` are what follows `python` on a command line, a path or `-m` and a module first.

    Its output and errors go to the two files that are sent along.
    """

    arguments: Sequence[str]
    folder: str
    environment: Mapping[str, str]
    spare: bool = False
    """Whether the first rank that it starts is a process that has been forked beforehand."""


@dataclass(eq=False)
class Forked:
    """A process that a server has forked; `status` is what `waitpid` gave, once it has ended."""

    pid: int
    status: int | None = None


class ForkServer:
    """Starts `tests.ranks.server` at once; ends it, not what it has forked, in `close`."""

    def __init__(self) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            # What a killed rank printed is in its log, not in its buffer.
            "PYTHONUNBUFFERED": "1",
            # TCPStore asks the name server about ::ffff:127.0.0.1; one that does not answer costs 5 s by default.
            "RES_OPTIONS": "timeout:1 attempts:1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        if sys.platform == "linux":
            # Otherwise gloo asks for the host's name, which need not resolve.
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        command = [sys.executable, "-m", "tests.ranks.server", str(theirs.fileno()), str(os.getpid())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, cwd=ROOT, start_new_session=True
        )
        theirs.close()
        self._requests = mine
        self._forked: dict[int, Forked] = {}
        mine.settimeout(START_SECONDS)

    @property
    def pid(self) -> int:
        """The server itself."""
        return self._process.pid

    def fileno(self) -> int:
        """Readable when a forked process has ended and `read_exit` has something to do."""
        return self._requests.fileno()

    def close(self) -> None:
        """End the server; what it has forked dies with it."""
        self._requests.close()
        self._process.kill()
        self._process.wait()

    def fork(self, script: Script | None, *fds: int) -> Forked:
        """A new process: a rank that serves calls from two sockets, or a script that writes to two files."""
        socket.send_fds(self._requests, [pickle.dumps(script)], fds)
        while True:
            kind, pid, status = self._read_message()
            if kind == "started":
                self._forked[pid] = Forked(pid)
                return self._forked[pid]
            self._forked.pop(pid).status = status

    def read_exit(self) -> None:
        """Wait until a process has ended, and note how."""
        _, pid, status = self._read_message()
        self._forked.pop(pid).status = status

    def read_exits(self, seconds: float = 0.0, until: Forked | None = None) -> None:
        """Note which processes have ended, for `seconds` at most or until one process has."""
        limit = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            while (until is None or until.status is None) and selector.select(max(0.0, limit - time.monotonic())):
                self.read_exit()

    def _read_message(self) -> tuple[str, int, int]:
        message = self._requests.recv(4096)
        if not message:
            raise RuntimeError("the process that forks ranks has ended: see its output above")
        kind, pid, status = pickle.loads(message)
        return kind, pid, status

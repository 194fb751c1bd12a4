"""Starts Python programs without the seconds that importing takes: each is forked from a process that has imported."""

import atexit
import functools
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.ranks.forks import Forked, ForkServer, Script


class WarmProcess:
    """A running program; the part of `subprocess.Popen` that tests need."""

    def __init__(self, server: ForkServer, forked: Forked) -> None:
        self._server = server
        self._forked = forked

    @property
    def pid(self) -> int:
        """Of the program's process, which leads a session of its own."""
        return self._forked.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while it runs."""
        self._server.read_exits()
        return None if self._forked.status is None else os.waitstatus_to_exitcode(self._forked.status)

    def wait(self, seconds: float) -> int:
        """The exit code; `subprocess.TimeoutExpired` when the program takes longer."""
        self._server.read_exits(seconds, until=self._forked)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", seconds)
        return code

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def start_warm(
    *arguments: str,
    folder: Path,
    environment: Mapping[str, str],
    out: Path,
    err: Path | None = None,
    spare: bool = False,
) -> WarmProcess:
    """Start what `python *arguments` would, a file or `-m` and a module first, and append what it writes to files.

    What the started program starts itself is a new Python, as ever; with `spare` its first rank has imported, too.
    """
    with out.open("a") as out_file, (err or out).open("a") as err_file:
        script = Script(arguments, str(folder), dict(environment), spare)
        server = _server()
        return WarmProcess(server, server.fork(script, out_file.fileno(), err_file.fileno()))


def run_warm(*arguments: str, folder: Path, environment: Mapping[str, str], seconds: float) -> tuple[int, str]:
    """Exit code, and output and errors as one text, of what `start_warm` starts; the time limit ends it."""
    with tempfile.NamedTemporaryFile(prefix="warm-") as file:
        out = Path(file.name)
        process = start_warm(*arguments, folder=folder, environment=environment, out=out)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"no end after {seconds} s\n{out.read_text(errors='replace')}") from None
        return code, out.read_text(errors="replace")


@functools.cache
def _server() -> ForkServer:
    server = ForkServer()
    atexit.register(server.close)
    return server

"""Ending processes: with their parent, with their children, and saying how they ended."""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_SECONDS = 0.5


def die_with(parent: int, kernel: bool = True) -> None:
    """End this process, and its children, when the process `parent` ends.

    On Linux the kernel does it for a direct parent, at once and whatever this process is busy with. A thread does it
    everywhere else, and for a parent that is not direct: a fork server is between.

    Args:
        parent: A process id.
        kernel: False for a parent that starts processes from a thread which may end before it: the kernel means the thread.
    """
    name = f"parent-watch-{parent}"
    if any(thread.name == name for thread in threading.enumerate()):
        return
    direct = os.getppid() == parent
    if kernel and direct and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not _exists(parent) or (direct and os.getppid() != parent):
        leave(1)

    def watch() -> None:
        while _exists(parent) and (not direct or os.getppid() == parent):
            time.sleep(_PARENT_CHECK_SECONDS)
        leave(1)

    threading.Thread(target=watch, name=name, daemon=True).start()


@contextlib.contextmanager
def crashes_shown() -> Generator[None, None, None]:
    """A context in which a crash in native code prints where each thread of Python was.

    A rank that such a crash ends has no traceback, and the others can only name its signal. Where the user has set up `faulthandler`,
    or there is no real file behind `sys.stderr`, nothing changes.
    """
    if faulthandler.is_enabled():
        yield
        return
    try:
        faulthandler.enable()
    except (OSError, ValueError, RuntimeError, AttributeError):
        yield
        return
    try:
        yield
    finally:
        faulthandler.disable()


def leave(code: int) -> None:
    """End this process now, whatever its main thread waits for, after its children."""
    kill_children()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def kill_children() -> None:
    """SIGKILL every descendant: data loading processes, and ranks when this process started them."""
    for pid in reversed(_descendants(os.getpid())):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def describe_exit(code: int) -> str:
    """How a process with `subprocess`'s or `multiprocessing`'s exit code ended, to be read after "rank 3 "."""
    if code >= 0:
        return f"ended with exit code {code} before its work was done"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (the system kills processes this way when memory runs out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *_descendants(child)]
    return found

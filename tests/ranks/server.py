"""A process that has imported the heavy libraries once and forks rank processes on request.

Not `multiprocessing`'s fork server: that one outlives a killed pytest while its children live, and cannot tell
which signal ended a child whose pipes were inherited by grandchildren.
"""

import array
import contextlib
import gc
import importlib
import os
import pickle
import pkgutil
import select
import signal
import socket
import sys

from tests.ranks.forks import Script
from tests.ranks.parent_death import die_with_parent
from tests.ranks.script import run_script

PRELOAD = (
    "pytest",
    "torch",
    "torch._dynamo.backends.common",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.experimental",
    "torch.distributed.tensor.parallel",
    "torch.utils.data",
    "torchmetrics",
    "lightning.pytorch",
    "lightning.pytorch.demos.boring_classes",
    "lightning.pytorch.strategies",
    "tests.ranks.worker",
)
"""Imported before the first fork. None of them starts a thread, which a fork would lose (see `main`)."""
REQUEST_BYTES = 1 << 17


def main(request_fd: int, parent: int) -> int:
    """Serve fork requests until the pool closes its end; in a forked script, run it. Gives the exit code."""
    die_with_parent(parent)
    # Ctrl-C is the pool's to handle: it ends the ranks by closing this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = socket.socket(fileno=request_fd)
    # What is imported stays: looking for garbage in it is an eighth of the time.
    gc.disable()
    for name in PRELOAD:
        importlib.import_module(name)
    # The code under test: when it does not import, the calls say so.
    with contextlib.suppress(Exception):
        for found in pkgutil.walk_packages(importlib.import_module("lightning_5d").__path__, "lightning_5d."):
            if not found.name.endswith("__main__"):
                with contextlib.suppress(Exception):
                    importlib.import_module(found.name)
    threads = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1
    if threads != 1:
        raise RuntimeError(f"preloading started {threads - 1} threads: a fork would lose them")
    # Objects made so far are never collected, so that a collection in a child does not copy their pages.
    gc.freeze()
    gc.enable()
    script = _serve(requests)
    return 0 if script is None else run_script(script)


def _serve(requests: socket.socket) -> Script | None:
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([requests, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
            _report_exits(requests)
        if requests in ready:
            fds = array.array("i")
            message, ancillary, _, _ = requests.recvmsg(REQUEST_BYTES, socket.CMSG_SPACE(2 * fds.itemsize))
            if not message:
                return None
            for _, _, payload in ancillary:
                fds.frombytes(payload)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for fd in (wake_read, wake_write):
                    os.close(fd)
                requests.close()
                script: Script | None = pickle.loads(message)
                die_with_parent(os.getppid())
                os.setsid()
                if script is None:
                    _become_worker(*fds)
                for number, fd in enumerate(fds, 1):
                    os.dup2(fd, number)
                    os.close(fd)
                return script
            for fd in fds:
                os.close(fd)
            requests.send(pickle.dumps(("started", pid, 0)))


def _report_exits(requests: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        requests.send(pickle.dumps(("ended", pid, status)))


def _become_worker(call_fd: int, control_fd: int) -> None:
    code = 1
    try:
        from tests.ranks.worker import work

        work(call_fd, control_fd)
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    # A script ends as Python ends: it waits for threads, and runs what was registered for the end.
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))

"""SIGTERM without a collective in the signal handler."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.trainer.connectors.signal_connector import _SIGNUM, _HandlersCompose, _SignalConnector

from lightning_5d.launch.processes import leave

if TYPE_CHECKING:
    import lightning.pytorch as pl

TERMINATION_SECONDS = 8.0
"""From SIGTERM to the end of the process, at the latest."""
STUCK_SECONDS = 4.0
"""How long the main thread may take to notice SIGINT or SIGTERM."""


class SignalConnector(_SignalConnector):
    """Lightning's signal handling, except that a rank does not wait for the others inside the handler.

    Lightning 2.6.6 broadcasts in the handler: when ranks get the signal at different points of a step, or only one
    gets it, all of them wait for ever. Here each stops at its next batch, tells the others by ending, and is ended if
    that takes too long. Under Slurm, which kills by itself, there is no such limit: the time is for checkpoints.
    """

    def _sigterm_notifier_fn(self, signum: _SIGNUM, _: FrameType) -> None:
        if not self.received_sigterm:
            launcher = self.trainer.strategy.launcher
            if launcher is not None:
                launcher.kill(signum)
            if not isinstance(self.trainer._accelerator_connector.cluster_environment, SLURMEnvironment):
                timer = threading.Timer(TERMINATION_SECONDS, leave, (128 + signal.SIGTERM,))
                timer.daemon = True
                timer.start()
        self.received_sigterm = True


def take_over_sigterm(trainer: "pl.Trainer") -> None:
    """Give `trainer` the handling above."""
    if type(trainer._signal_connector) is _SignalConnector and os.name == "posix":
        trainer._signal_connector = SignalConnector(trainer)


@contextmanager
def ended_when_stuck(noticed: Callable[[], bool]) -> Generator[None, None, None]:
    """End the process when its main thread does not get to handle SIGINT or SIGTERM.

    Python runs signal handlers between two of its own instructions, so a main thread that waits in a collective for a
    rank that hangs never does. The interpreter's C handler writes to a socket at once, and a thread reads it.

    Args:
        noticed: Whether the main thread has handled the signal.
    """
    if threading.current_thread() is not threading.main_thread() or os.name != "posix":
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    over = threading.Event()

    def watch() -> None:
        while numbers := reader.recv(16):
            for number in numbers:
                if _is_ours(number) and not over.wait(STUCK_SECONDS) and not noticed():
                    leave(128 + number)
            if over.is_set():
                return

    threading.Thread(target=watch, name="signal-watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        writer.close()


def _is_ours(number: int) -> bool:
    handler = signal.getsignal(number) if number in (signal.SIGINT, signal.SIGTERM) else None
    return handler is signal.default_int_handler or isinstance(handler, _HandlersCompose)

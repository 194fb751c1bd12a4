"""SIGTERM without a collective in the signal handler."""

import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.trainer.connectors.signal_connector import _SIGNUM, _SignalConnector

from lightning_5d.launch.processes import leave

if TYPE_CHECKING:
    import lightning.pytorch as pl

TERMINATION_SECONDS = 8.0
"""From SIGTERM to the end of the process, at the latest."""


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

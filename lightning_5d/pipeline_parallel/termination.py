"""Whether rank 0 was asked to end, without every batch waiting for every rank to hear it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

if TYPE_CHECKING:
    import lightning.pytorch as pl

# Checked with lightning 2.6.6: its loop broadcasts rank 0's word before each batch, and rank 0 waits until all others listen.
_METHOD = "_broadcast_sigterm_tensor"


@contextmanager
def late_termination(trainer: pl.Trainer, group: dist.ProcessGroup) -> Generator[None, None, None]:
    """Inside, all ranks end a batch later than rank 0 was asked to, by SIGTERM, and no rank waits for another to hear it.

    Args:
        trainer: The Trainer.
        group: All ranks, on a backend for the host.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    said: list[tuple[Any, Tensor]] = []

    def broadcast() -> None:
        flag = torch.tensor([int(getattr(trainer, "received_sigterm", False))])
        said.append((dist.broadcast(flag, group_src=0, group=group, async_op=True), flag))
        if len(said) > 1:
            work, before = said.pop(0)
            work.wait()
            if before:
                dist.barrier(group=group)  # as Lightning does, so that no rank ends while another still needs it
                raise SIGTERMException

    setattr(loop, _METHOD, broadcast)
    try:
        yield
    finally:
        delattr(loop, _METHOD)

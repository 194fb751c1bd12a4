"""Whether what runs now is a part of the step, or runs once more for somebody else's sake."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointFunction

from lightning_5d.saved_activations import Meter

_REENTRANT = CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__


def is_repeated() -> bool:
    """Whether backward runs this again, or recomputation measures it before its first run; what counts tokens then counts none."""
    if torch.compiler.is_compiling():
        return False  # what is compiled decides for itself what it computes again, and writes once
    # Private names; checked with torch 2.13.
    return torch._C._current_graph_task_id() != -1 or any(
        isinstance(mode, Meter) for mode in _get_current_dispatch_mode_stack()
    )


def reentrant_checkpoint() -> Any:
    """The outermost reentrant checkpoint that runs now, by its node of the graph: the same object forward, and when backward runs it again.

    ``None`` outside of any. Such a checkpoint has no graph of its forward: what the second run must not make anew can be kept on the node.
    """
    found, frame = None, sys._getframe()
    while frame is not None:
        if frame.f_code in _REENTRANT:
            found = frame.f_locals["ctx"]
        frame = frame.f_back  # type: ignore[assignment]
    return found

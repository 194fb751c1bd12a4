"""Whether what runs now is a part of the step, or runs once more for somebody else's sake."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_5d.saved_activations import Meter


def is_repeated() -> bool:
    """Whether backward runs this again, or recomputation measures it before its first run; what counts tokens then counts none."""
    if torch.compiler.is_compiling():
        return False  # what is compiled decides for itself what it computes again, and writes once
    # Private names; checked with torch 2.13.
    return torch._C._current_graph_task_id() != -1 or any(
        isinstance(mode, Meter) for mode in _get_current_dispatch_mode_stack()
    )

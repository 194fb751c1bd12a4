"""Which module's code is at work inside a door, for what is said to a person."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_5d.context_parallel.inside import Inside


def refused(inside: Inside, what: str, fix: str) -> MisconfigurationException:
    """The error for something that a module does inside a door and that cannot be right there.

    Args:
        inside: The door that is open.
        what: What it does: follows the module's name.
        fix: The nearest thing that works.
    """
    cut = inside.sequence.cut
    return MisconfigurationException(
        f"{running_module(inside)} {what}. Inside {inside.name} each of {cut.size} ranks of ContextParallel computes on {cut.local} of"
        f" {cut.length} tokens. {fix}"
    )


def running_module(inside: Inside) -> str:
    """Name and class of the module whose forward calls."""
    running = list(_modules(sys._getframe(1)))
    if not running:
        return f"The code inside {inside.name}"
    inner, outer = running[0], running[-1]
    name = next((name for name, module in outer.named_modules() if module is inner), "")
    kind = type(inner).__name__
    return f"{name} ({kind})" if name else kind


def _modules(frame: FrameType | None) -> Iterator[nn.Module]:
    """The modules whose methods run, innermost first."""
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            yield module
        frame = frame.f_back

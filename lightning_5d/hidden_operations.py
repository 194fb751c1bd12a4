"""Operations that selective recomputation neither counts nor keeps.

It knows operations by their numbers: the third product of a block is the third one again when the block runs a second time. What keeps
something for later calls (a mask, a gather that several layers share), or is not the same on each rank, does not run the same
operations twice, and every number after it would be another one's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from lightning_5d.saved_activations import Meter

_COUNTING = (_CachingTorchDispatchMode, _CachedTorchDispatchMode, Meter)


_NOBODY = nullcontext()


def hidden_operations() -> AbstractContextManager[None]:
    """A context whose operations run each time; what comes out of it is an input of those behind it."""
    # Private names; checked with torch 2.13.
    stack = _get_current_dispatch_mode_stack()
    # Often asked, and hardly ever is there somebody to hide from.
    return _without_counting(stack) if any(isinstance(mode, _COUNTING) for mode in stack) else _NOBODY


@contextmanager
def _without_counting(stack: Sequence[Any]) -> Iterator[None]:
    # A mode is left out and not told to look away, as two of them are torch's.
    for _ in stack:
        _pop_mode()
    others = [mode for mode in stack if not isinstance(mode, _COUNTING)]
    for mode in others:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in others:
            _pop_mode()
        for mode in stack:
            _push_mode(mode)

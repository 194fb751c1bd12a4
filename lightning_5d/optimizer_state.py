"""Optimizer states that rest in 16 bits: wide while an optimizer steps, narrow in between.

None of torch's Adam family steps on states of another dtype than the gradients (checked with torch 2.13), and those optimizers
that do would round after every operation. So a step runs on fp32 copies, and its results are rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)


def narrow_states(optimizer: Any, dtype: torch.dtype) -> None:
    """Rounds state tensors of their parameter's shape to `dtype`; step counts stay as they are.

    Args:
        optimizer: A torch optimizer.
        dtype: A 16-bit dtype.
    """
    _convert(optimizer, lambda state, parameter: state.to(dtype))


def widen_states(optimizer: Any) -> None:
    """Gives state tensors that rest in 16 bits the dtype of their parameter."""
    _convert(optimizer, lambda state, parameter: state.to(parameter.dtype) if state.dtype in _HALF else state)


@torch.no_grad()
def _convert(optimizer: Any, change: Any) -> None:
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items():
            if _is_moment(key, value, parameter):
                entries[key] = change(value, parameter)


def _is_moment(key: str, value: Any, parameter: Any) -> bool:
    # A scalar parameter's moments have the shape of a step count, which torch's optimizers always call "step".
    return (
        key != "step"
        and isinstance(value, Tensor)
        and isinstance(parameter, Tensor)
        and value.is_floating_point()
        and value.shape == parameter.shape
    )

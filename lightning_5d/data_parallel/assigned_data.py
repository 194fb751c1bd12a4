"""`parameter.data = value` for parameters whose values lie on several ranks."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_5d.gradients import values_of

# Checked with torch 2.13: what a DTensor inherits gives the outer tensor other memory, which nobody reads, and leaves its values alone.
_INHERITED: Any = torch._C.TensorBase.data


@contextmanager
def assigned_data() -> Generator[None, None, None]:
    """Inside, values that are assigned to ``data`` of a DTensor become its values, as those of a plain tensor do.

    Moving averages are often written so: ``teacher.data = 0.99 * teacher.data + 0.01 * student.data``.
    """
    if "data" in vars(DTensor):  # of a run around this one
        yield
        return
    kind: Any = DTensor
    kind.data = property(_INHERITED.__get__, _assign)
    try:
        yield
    finally:
        del kind.data


@torch.no_grad()
def _assign(tensor: DTensor, value: Tensor) -> None:
    if not isinstance(value, DTensor) or _form(value) != _form(tensor):
        _INHERITED.__set__(tensor, value)
        return
    values_of(tensor).copy_(values_of(value.redistribute(placements=tensor.placements)))


def _form(tensor: DTensor) -> tuple[Any, ...]:
    return tensor.device_mesh, tensor.shape, tensor.dtype

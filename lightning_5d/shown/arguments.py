"""Tensors among the arguments of an operation: a walk that costs little, since each operation makes several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in tuples, lists and dictionaries inside one another."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)


def with_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same with other tensors in place of those."""
    if isinstance(value, Tensor):
        return change(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([with_tensors(one, change) for one in value])
    if kind is dict:
        return {key: with_tensors(one, change) for key, one in value.items()}
    if isinstance(value, tuple) and any(True for _ in tensors_in(value)):  # what PyTorch returns by name
        parts = [with_tensors(one, change) for one in value]
        return kind(*parts) if hasattr(value, "_make") else kind(parts)
    return value

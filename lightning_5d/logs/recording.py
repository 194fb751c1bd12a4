"""Calls of `self.log` in a step that runs in parts, made one: what a schedule of microbatches needs."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_5d.logs.values import LoggedValues


@dataclass(frozen=True)
class Call:
    """One call of `self.log`, as it reached the loop's collection.

    Attributes:
        fx: The hook it came from.
        options: Lightning's arguments by name.
    """

    fx: str
    name: str
    value: Any
    options: dict[str, Any]


@contextmanager
def recording(values: LoggedValues) -> Generator[list[Call], None, None]:
    """While it is open, calls are collected and not carried out. `replay` does that, here or on another rank."""
    calls: list[Call] = []

    def record(fx: str, name: str, value: Any, **options: Any) -> None:
        calls.append(Call(fx, name, value.detach() if isinstance(value, Tensor) else value, options))

    values.log = record  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        del values.log


def merge(calls: Sequence[Call]) -> list[Call]:
    """One call per key, with the value that a single step over the whole batch would have logged.

    Means are weighted by `batch_size` where it was given, sums are added, extremes are kept. Of a torchmetrics object, which has
    added up by itself, the last call counts.
    """
    by_key: dict[tuple[str, str], list[Call]] = {}
    for call in calls:
        by_key.setdefault((call.fx, call.name), []).append(call)
    return [_merged(same) for same in by_key.values()]


def replay(values: LoggedValues, calls: Sequence[Call]) -> None:
    """Carries out calls that were recorded."""
    for call in calls:
        values.log(call.fx, call.name, call.value, **call.options)


def _merged(calls: Sequence[Call]) -> Call:
    last = calls[-1]
    if len(calls) == 1 or not isinstance(last.value, Tensor):
        return last
    parts = torch.stack([call.value for call in calls])
    asked = last.options.get("reduce_fx", "mean")
    reduce = asked if isinstance(asked, str) else asked.__name__
    if reduce in ("sum", "max", "min"):
        return Call(last.fx, last.name, getattr(parts, reduce)(), last.options)
    sizes = [call.options.get("batch_size") for call in calls]
    if None in sizes:
        return Call(last.fx, last.name, parts.mean(), last.options)
    weights = torch.tensor(sizes, dtype=parts.dtype, device=parts.device)
    mean = (parts * weights).sum() / weights.sum()
    return Call(last.fx, last.name, mean, {**last.options, "batch_size": sum(sizes)})

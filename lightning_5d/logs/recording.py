"""Calls of `self.log` in a step that runs in parts, made one: what a schedule of microbatches needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_5d.logs.values import LoggedValues

_REDUCE: dict[str, Callable[[list[float]], float]] = {"sum": sum, "max": max, "min": min}


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
        # Lightning adds the value up at once; later it may have been written to.
        calls.append(Call(fx, name, value.detach().clone() if isinstance(value, Tensor) else value, options))

    values.log = record  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        del values.log


def merge(
    calls: Sequence[Sequence[Call]], rows: Sequence[int], losses: Sequence[tuple[float, float]] = ()
) -> list[Call]:
    """One call per key, with the value that a single step over the whole batch would have logged.

    Means are weighted by `batch_size`, which is added up, or by rows where none was given; then Lightning goes on to take it from
    the batch. A `batch_size` is taken for that of the whole batch if it is the number of its rows, or one number whatever the rows of the part. Sums are
    added, extremes are kept. Of a torchmetrics object, which has added up by itself, the last call counts. A key that a part logs twice is
    logged twice.

    Args:
        calls: Of each part, with values as numbers, 0-dim tensors or torchmetrics objects.
        rows: Of each part.
        losses: Of each part, the loss that its step returned and its weight, if it gave one. A key that is this loss is weighted likewise.
    """
    by_key: dict[tuple[str, str, int], list[tuple[int, Call]]] = {}
    for part, its_calls in enumerate(calls):
        counts: dict[tuple[str, str], int] = {}
        for call in its_calls:
            times = counts[call.fx, call.name] = counts.get((call.fx, call.name), -1) + 1
            by_key.setdefault((call.fx, call.name, times), []).append((part, call))
    return [_merged(same, rows, losses) for same in by_key.values()]


def replay(values: LoggedValues, calls: Sequence[Call]) -> None:
    """Carries out calls that were recorded."""
    for call in calls:
        values.log(call.fx, call.name, call.value, **call.options)


def _merged(same: Sequence[tuple[int, Call]], rows: Sequence[int], losses: Sequence[tuple[float, float]]) -> Call:
    last = same[-1][1]
    if len(same) == 1 or not isinstance(last.value, (int, float, Tensor)):
        return last
    values = [float(call.value) for _, call in same]
    asked = last.options.get("reduce_fx", "mean")
    reduce = asked.lower() if isinstance(asked, str) else asked.__name__
    if reduce in _REDUCE:
        unknown = any(math.isnan(value) for value in values)
        return _like(last, math.nan if unknown else _REDUCE[reduce](values), last.options)
    parts = [part for part, _ in same]
    given = [call.options.get("batch_size") for _, call in same]
    sizes: list[int] = [] if None in given else [int(size) for size in given if size is not None]
    weights = [float(rows[part]) for part in parts]
    counted = bool(sizes) and not _of_whole_batch(sizes, [rows[part] for part in parts], sum(rows))
    options = last.options
    if losses and all(
        not losses[part][1] or _equal(value, losses[part][0]) for value, part in zip(values, parts, strict=True)
    ):
        weights = [losses[part][1] for part in parts]
    elif counted:
        weights = [float(size) for size in sizes]
    if counted:
        options = {**options, "batch_size": sum(sizes)}
    counting = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    total = sum(weight for _, weight in counting)
    return _like(last, sum(v * w for v, w in counting) / total if counting else values[-1], options)


def _of_whole_batch(sizes: Sequence[int], rows: Sequence[int], batch_rows: int) -> bool:
    one = len(set(sizes)) == 1
    return one and (sizes[0] == batch_rows or len(set(rows)) > 1 or (sizes[0] == 1 and rows[0] > 1))


def _like(call: Call, value: float, options: dict[str, Any]) -> Call:
    if isinstance(call.value, Tensor):
        whole = call.value.is_floating_point() or float(value).is_integer()
        dtype = call.value.dtype if whole else torch.get_default_dtype()
        return Call(call.fx, call.name, torch.tensor(value, dtype=dtype, device=call.value.device), options)
    return Call(call.fx, call.name, value, options)


def _equal(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))

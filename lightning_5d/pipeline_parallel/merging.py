"""Values of microbatches made one: the values that one step over the whole batch would have had."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_5d.pipeline_parallel.containers import children, described, has_rows, of_type, rebuilt

# A first batch of rows that are alone in their microbatches would else become the number of microbatches.
_INDEX = re.compile(r"(?i)(idx|index)'\]$")


def merged(values: Sequence[Any], rows: Sequence[int], weights: Sequence[float], where: str) -> Any:
    """What sits at one place of several outputs, made one: see `lightning_5d.pipeline_parallel.outputs.merge_outputs`.

    Args:
        values: One for each microbatch.
        rows: Rows of each microbatch.
        weights: Weights of averages; what has weight 0 leaves nothing in them.
        where: The place, for messages.
    """
    if any(value is None for value in values):
        present = [index for index, value in enumerate(values) if value is not None]
        if not present:
            return None
        rows, weights = [rows[index] for index in present], [weights[index] for index in present]
        values = [values[index] for index in present]
    first = values[0]
    if any(type(value) is not type(first) for value in values) and not _alike(values):
        kinds = ", ".join(sorted({type(value).__name__ for value in values}))
        raise _unlike(where, f"some microbatches have one type and some another: {kinds}")
    if any(isinstance(value, Tensor) for value in values):
        return _merged_tensors([torch.as_tensor(value) for value in values], rows, weights, where)
    if isinstance(first, (np.ndarray, np.generic)):
        if first.dtype.kind not in "biufc":
            return np.concatenate(values)  # text or objects
        whole = _merged_tensors([torch.as_tensor(value) for value in values], rows, weights, where).numpy()
        return whole if isinstance(first, np.ndarray) else whole[()]
    if isinstance(first, (bool, int, float)):
        return _merged_numbers(values, rows, weights, where)
    if isinstance(first, (list, tuple)) and _in_rows(values, rows):
        return of_type(first, [item.detach() if isinstance(item, Tensor) else item for part in values for item in part])
    inside = [children(value) for value in values]
    if inside[0] is None:
        if all(_same(value, first) for value in values[1:]):
            return first
        raise _unlike(where, f"{described(first)} and {described(next(v for v in values if not _same(v, first)))}")
    by_key: dict[Any, list[Any]] = {key: [] for part in inside for key, _ in part or ()}
    for part in inside:
        held = dict(part or ())
        for key, column in by_key.items():
            column.append(held.get(key))
    fullest = max(values, key=lambda value: len(children(value) or ()))
    return rebuilt(fullest, {key: merged(column, rows, weights, f"{where}[{key!r}]") for key, column in by_key.items()})


def _alike(values: Sequence[Any]) -> bool:
    return all(isinstance(value, (int, float)) for value in values) or (
        any(isinstance(value, Tensor) for value in values) and all(isinstance(v, (Tensor, int, float)) for v in values)
    )


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The mean of tensors of one shape in their own dtype; what has weight 0 leaves nothing, not even NaN."""
    counting = [(value.detach(), weight) for value, weight in zip(values, weights, strict=True) if weight]
    if not counting:
        return values[0].detach()
    precise = counting[0][0].double() if counting[0][0].device.type != "mps" else counting[0][0].float()
    total = precise * counting[0][1]
    for value, weight in counting[1:]:
        total = total + value.to(precise.dtype) * weight
    mean: Tensor = (total / sum(weight for _, weight in counting)).to(values[0].dtype)
    return mean


def _merged_tensors(values: Sequence[Tensor], rows: Sequence[int], weights: Sequence[float], where: str) -> Tensor:
    tensors = [value.detach() for value in values]
    first = tensors[0]
    if len(tensors) == 1:
        return first
    if not first.dim():
        if first.is_floating_point() or first.is_complex():
            return weighted_mean(tensors, weights)
        if first.dtype is torch.bool:
            kept: Tensor = _kept(tensors, where)
            return kept
        return torch.stack(tensors).sum().to(first.dtype)
    if any(tensor.shape[1:] != first.shape[1:] for tensor in tensors):
        shapes = sorted({tuple(tensor.shape) for tensor in tensors})
        raise _unlike(where, f"tensors of shapes {', '.join(map(str, shapes[:4]))}, which differ beyond dimension 0")
    multiples = {tensor.shape[0] / row for tensor, row in zip(tensors, rows, strict=True)}
    follows = len(multiples) == 1 and multiples.pop().is_integer()
    if follows or len({tensor.shape[0] for tensor in tensors}) > 1:
        return torch.cat(tensors)
    if all(torch.equal(tensor, first) for tensor in tensors[1:]):
        return first
    if first.is_floating_point() or first.is_complex():
        return weighted_mean(tensors, weights)
    raise _unlike(
        where, f"different whole numbers in a tensor of shape {tuple(first.shape)}, which does not follow the rows"
    )


def _merged_numbers(values: Sequence[Any], rows: Sequence[int], weights: Sequence[float], where: str) -> Any:
    first = values[0]
    if len(values) == 1:
        return first
    if any(isinstance(value, float) for value in values):
        counting = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
        total = sum(weight for _, weight in counting)
        return sum(value * weight for value, weight in counting) / total if counting else float(first)
    if isinstance(first, bool):
        return _kept(values, where)
    if list(values) == list(rows) and not _INDEX.search(where):
        return sum(values)
    return first if all(value == first for value in values) else sum(values)


def _kept(values: Sequence[Any], where: str) -> Any:
    if all(bool(value) == bool(values[0]) for value in values):
        return values[0]
    raise _unlike(where, "True in some microbatches and False in others")


def _in_rows(values: Sequence[Any], rows: Sequence[int]) -> bool:
    lengths = [len(value) for value in values]
    if lengths != list(rows):
        return len(set(lengths)) > 1 and not hasattr(values[0], "_fields")
    if hasattr(values[0], "_fields") or any(has_rows(value, row) for value, row in zip(values, rows, strict=True)):
        return False
    scalars = any(isinstance(item, float) or (isinstance(item, Tensor) and not item.dim()) for item in values[0])
    return not (isinstance(values[0], tuple) and scalars)


def _same(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return False


def _unlike(where: str, what: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"A step runs once per microbatch, and what it returned at {where} cannot be made one: {what}. Return tensors or lists with an"
        " entry per row, or numbers; or give the LightningModule a method `merge_outputs(self, outputs, rows)`."
    )

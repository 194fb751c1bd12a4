"""A batch in microbatches, and what the steps over them returned made one again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_5d.pipeline_parallel.containers import children, described, has_rows, leaves, of_type, rebuilt
from lightning_5d.pipeline_parallel.outputs import merge_outputs

__all__ = ["Microbatch", "Splitter", "batch_rows", "merge_outputs", "split_batch"]

_OWN_WAY = "Give the LightningModule a method `split_batch(self, batch, count)` that returns up to `count` smaller batches in order."
_NOT_SPLIT = "A batch needs a tensor, or a list with one item per row, to be split into microbatches."


@dataclass(frozen=True)
class Microbatch:
    """A part of a batch.

    Attributes:
        batch: Built like the whole batch. Tensors are views of those of the batch.
        rows: How many of the batch's rows it holds.
    """

    batch: Any
    rows: int


Splitter = Callable[[Any, int], Sequence[Any]]
"""A user's own way to split: of a batch and the wanted number, the smaller batches (or `Microbatch` objects, with their rows)."""


def batch_rows(batch: Any) -> int:
    """How many rows a batch has, the rule of Lightning's `batch_size`: those of the first tensor with a dimension.

    There are two exceptions. A single row, such as positions of shape (1, S), is passed over while any tensor has more. And where sequences
    of one length lie side by side (images and targets of a detection batch, each a list with an item per row) whose tensors
    differ in dimension 0, the rows are their items. Without tensors, the first list of strings, numbers or other objects counts.

    Raises:
        MisconfigurationException: If the batch has no rows that could be counted, or none at all.
    """
    sizes = [leaf.shape[0] for _, leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    rows = _side_by_side(batch, sizes)
    if rows is None and sizes:
        rows = next((size for size in sizes if size != 1), 1)
    if rows is None:
        rows = _first_list(batch)
    if rows is None:
        raise MisconfigurationException(f"{_NOT_SPLIT} This one is {described(batch)}. {_OWN_WAY}")
    if rows == 0:
        raise MisconfigurationException(
            f"The batch is empty: {described(batch)}. A pipeline needs at least one row; leave empty batches out (drop_last=True,"
            " or a batch sampler that never gives one)."
        )
    return rows


def split_batch(batch: Any, count: int, own: Splitter | None = None) -> list[Microbatch]:
    """A batch in `count` microbatches, the first of which have a row more where it does not divide.

    Every tensor with as many rows as the batch is split along dimension 0, and so is every list or tuple with an item for each
    row; masks and positions travel with their rows. Everything else goes whole to every microbatch: tensors with one row or
    another number of them (class weights), 0-dim ones, strings, numbers, ``None``, objects.

    Args:
        batch: Tensors in any nesting of tuples, lists, mappings, named tuples and dataclasses.
        count: The wanted number of microbatches. There are never more than rows.
        own: The user's own way, which wins.

    Raises:
        MisconfigurationException: If the batch is empty or nothing in it can be split.
        ValueError: If `count` is less than 1.
    """
    if count < 1:
        raise ValueError(f"A batch cannot be split into {count} microbatches; give at least 1.")
    if own is not None:
        return _split_by(own, batch, count)
    rows = batch_rows(batch)
    small, larger = divmod(rows, min(count, rows))
    sizes = [small + 1] * larger + [small] * (min(count, rows) - larger)
    parts = _split(batch, rows, sizes, "batch")
    return [Microbatch(part, size) for part, size in zip(parts, sizes, strict=True)]


def _side_by_side(batch: Any, sizes: Sequence[int]) -> int | None:
    inside = children(batch) or []
    columns = [child for _, child in inside]
    if len(set(sizes)) < 2 or not columns or not all(isinstance(column, (list, tuple)) for column in columns):
        return None
    lengths = {len(column) for column in columns}
    return lengths.pop() if len(lengths) == 1 else None


def _first_list(batch: Any) -> int | None:
    inside = children(batch)
    if not inside:
        return 0 if inside is not None and isinstance(batch, (list, tuple)) else None
    if isinstance(batch, (list, tuple)) and all(children(child) is None for _, child in inside):
        return len(batch)
    return next((found for _, child in inside if (found := _first_list(child)) is not None), None)


def _split(value: Any, rows: int, sizes: Sequence[int], where: str) -> list[Any]:
    if isinstance(value, Tensor):
        if not value.dim() or value.shape[0] != rows:
            return [value] * len(sizes)
        if value.is_nested or value.layout is not torch.strided:
            raise _no_views(where, f"a tensor of layout {value.layout}")
        return list(torch.split(value, list(sizes)))
    if isinstance(value, PackedSequence):
        raise _no_views(where, "a PackedSequence, whose rows are interleaved")
    if isinstance(value, np.ndarray) and value.ndim and value.shape[0] == rows:
        return np.split(value, list(accumulate(sizes))[:-1])
    inside = children(value)
    if inside is None:
        return [value] * len(sizes)
    if isinstance(value, (list, tuple)) and len(value) == rows and not has_rows(value, rows):
        return [of_type(value, value[start:end]) for start, end in pairwise((0, *accumulate(sizes)))]
    parts = {key: _split(child, rows, sizes, f"{where}[{key!r}]") for key, child in inside}
    return [rebuilt(value, {key: part[index] for key, part in parts.items()}) for index in range(len(sizes))]


def _split_by(own: Splitter, batch: Any, count: int) -> list[Microbatch]:
    parts = list(own(batch, count))
    if not 1 <= len(parts) <= count:
        raise MisconfigurationException(
            f"split_batch returned {len(parts)} microbatches where {count} were asked for; return from 1 to {count}."
        )
    return [part if isinstance(part, Microbatch) else Microbatch(part, _rows_or_one(part)) for part in parts]


def _rows_or_one(part: Any) -> int:
    sizes = [leaf.shape[0] for _, leaf in leaves(part) if isinstance(leaf, Tensor) and leaf.dim()]
    found = next((size for size in sizes if size != 1), 1) if sizes else _first_list(part)
    return found or 1


def _no_views(where: str, what: str) -> MisconfigurationException:
    return MisconfigurationException(f"{where} is {what}, and cannot be split into microbatches. {_OWN_WAY}")

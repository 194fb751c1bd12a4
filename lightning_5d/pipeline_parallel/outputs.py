"""What steps over microbatches returned, made what a step over the whole batch would have returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_5d.loss import weight_of
from lightning_5d.pipeline_parallel.containers import rebuilt
from lightning_5d.pipeline_parallel.merging import merged, weighted_mean


def merge_outputs(outputs: Sequence[Any], rows: Sequence[int], *, training: bool = False) -> Any:
    """What one call of a step over the whole batch would have returned.

    - ``None`` everywhere stays ``None``; where only some steps returned something, or set a key, that is merged.
    - Tensors whose dimension 0 is the number of rows, or the same multiple of it everywhere (flattened tokens), are concatenated,
      as are those that differ in dimension 0 alone. Tensors of one shape that do not follow the rows are averaged, weighted by rows, or kept
      if they are equal.
    - 0-dim floating tensors and floats are averaged, weighted by rows; 0-dim whole-number tensors are counts and added up. Whole numbers that are
      the number of rows, or differ, are added up, too; equal ones, and what is called an index or idx, are kept.
    - Lists and tuples with an item per row are concatenated, as are those of differing length; others are merged item by item.
    - Mappings, named tuples and dataclasses are merged key by key, and strings and other objects kept where they are equal.

    Args:
        outputs: What each microbatch's step returned, in order.
        rows: Rows of each microbatch.
        training: A `training_step` returned them: ``loss`` follows the loss contract (see `lightning_5d.loss`). With weights it
            is their weighted mean, ``weight`` is their sum, and microbatches of weight 0 leave nothing in any average.

    Returns:
        The output, without a graph.

    Raises:
        MisconfigurationException: If values cannot be made one, with where they are.
    """
    if len(outputs) != len(rows):
        raise ValueError(f"There are {len(outputs)} outputs of {len(rows)} microbatches.")
    if training:
        return _merge_training_outputs(outputs, rows)
    return merged(outputs, rows, [float(row) for row in rows], "output")


def weights_of(outputs: Sequence[Any]) -> list[float | None]:
    """The weight that each microbatch's step returned, or ``None``.

    Raises:
        MisconfigurationException: If some returned one and others did not.
    """
    weights = [weight_of(output) for output in outputs]
    given = sum(weight is not None for weight in weights)
    if given not in (0, len(weights)):
        raise MisconfigurationException(
            f"Of {len(weights)} microbatches {given} returned a weight. Return one from every training_step, or from none."
        )
    return weights


def losses_of(outputs: Sequence[Any]) -> list[Any]:
    """The loss that each microbatch's step returned, or ``None``."""
    return [output.get("loss") if isinstance(output, Mapping) else output for output in outputs]


def _merge_training_outputs(outputs: Sequence[Any], rows: Sequence[int]) -> Any:
    given = weights_of(outputs)
    weights = [float(row) for row in rows] if None in given else [float(weight or 0.0) for weight in given]
    if all(isinstance(output, Tensor) and output.numel() == 1 for output in outputs):
        return weighted_mean(outputs, weights)  # also of shape (1,), which would else be taken for a row
    whole = merged(outputs, rows, _without_empty(rows, weights), "output")
    if not isinstance(whole, Mapping) or whole.get("loss") is None:
        return whole
    losses = [loss for loss in losses_of(outputs) if loss is not None]
    parts: dict[Any, Any] = {**whole, "loss": _loss(losses, weights)}
    if None not in given:
        total, as_given = sum(weights, 0.0), whole["weight"]
        if isinstance(as_given, Tensor):
            parts["weight"] = torch.full_like(as_given, total)
        else:
            parts["weight"] = type(as_given)(total) if isinstance(as_given, int) and total.is_integer() else total
    return rebuilt(whole, parts)


def _without_empty(rows: Sequence[int], weights: Sequence[float]) -> list[float]:
    return [float(row) if weight else 0.0 for row, weight in zip(rows, weights, strict=True)]


def _loss(losses: Sequence[Any], weights: Sequence[float]) -> Any:
    if not isinstance(losses[0], Tensor):
        return losses[0]
    if not any(weights):
        return torch.zeros_like(losses[0].detach())
    return weighted_mean(losses, weights)

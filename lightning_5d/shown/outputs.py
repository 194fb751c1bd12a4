"""What steps return, with whole tensors in place of those that each rank holds a part of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_5d.pipeline_parallel.containers import children, rebuilt
from lightning_5d.shown.tensor import ShownTensor


def with_wholes(output: Any, kind: type[ShownTensor], *, training: bool = False) -> Any:
    """A step's output with whole plain tensors in place of those of a kind, wherever they are in it; all ranks of the axis call it.

    Args:
        output: What the step returned: containers of any type in one another.
        kind: Which tensors. Tensors of lower kinds that they hold are made whole, too.
        training: It was a `training_step`. Its ``loss`` stays as it is, and what is beside it loses its graph.
    """
    return _whole(output, kind, training, keep="loss" if training and isinstance(output, Mapping) else None)


def _whole(value: Any, kind: type[ShownTensor], training: bool, keep: str | None = None) -> Any:
    if isinstance(value, kind):
        whole = value.gathered() if training else value.whole()
        return _whole(whole, ShownTensor, training)
    inside = children(value)
    if inside is None:
        return value
    parts = {key: child if key == keep else _whole(child, kind, training) for key, child in inside}
    return rebuilt(value, parts) if any(parts[key] is not child for key, child in inside) else value

"""Parameters without elements, for optimizers of weights that this rank does not hold."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_MARK = "_fived_placeholder"


def placeholder(device: torch.device, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A new parameter without elements; it has no gradient ever, so an optimizer has no state for it."""
    # Of two dimensions, as some optimizers take nothing but matrices.
    made = nn.Parameter(torch.empty(0, 0, device=device, dtype=dtype))
    setattr(made, _MARK, True)
    return made


def is_placeholder(parameter: Tensor) -> bool:
    """Whether a parameter of an optimizer stands for weights that are on other ranks."""
    return bool(getattr(parameter, _MARK, False))


@contextmanager
def accepting_empty(device: torch.device) -> Generator[None, None, None]:
    """A context in which an optimizer, or a group of its parameters, may be made of nothing: it then gets a placeholder.

    No module holds it, so checkpoints of a module neither have nor miss it.
    """
    # torch refuses an empty list inside of `Optimizer.__init__`, which every optimizer calls, by whatever way; checked with 2.13.
    original = Optimizer.__init__

    def init(self: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        original(self, params if isinstance(params, Tensor) else _filled(list(params), device), defaults)

    setattr(Optimizer, "__init__", init)  # noqa: B010  # mypy takes a method for something fixed
    try:
        yield
    finally:
        setattr(Optimizer, "__init__", original)  # noqa: B010


def _filled(params: list[Any], device: torch.device) -> list[Any]:
    if not params:
        return [placeholder(device)]
    if not all(isinstance(group, Mapping) and "params" in group for group in params):
        return params
    # Groups may be made of iterators, which are looked at once.
    groups = [
        {**group, "params": [*found]} if not isinstance(found := group["params"], Tensor | set) else group
        for group in params
    ]
    named = any(isinstance(item, tuple) for group in groups for item in group["params"])
    for index, group in enumerate(groups):
        if isinstance(group["params"], list) and not group["params"]:
            nothing = placeholder(device)
            group["params"] = [(f"placeholder.{index}", nothing)] if named else [nothing]
    return groups

"""Where the hidden input of a module is among its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

Place = int | str


def door_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Place | None:
    """Where a module's hidden input is: its first positional tensor, ``hidden_states``, or its first tensor by name."""
    for index, value in enumerate(args):
        if isinstance(value, Tensor):
            return index
    if isinstance(kwargs.get("hidden_states"), Tensor):
        return "hidden_states"
    return next((name for name, value in kwargs.items() if isinstance(value, Tensor)), None)


def argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: Place) -> Tensor:
    """The argument at a place."""
    found: Tensor = args[place] if isinstance(place, int) else kwargs[place]
    return found


def with_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: Place, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with another one at a place."""
    if isinstance(place, int):
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, place: value}


def first_positional(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the first of them by position, however it was given."""
    if args:
        return args, kwargs
    names = [name for name in inspect.signature(type(module).forward).parameters if name in kwargs]
    if not names:
        raise TypeError(f"{type(module).__name__} was called without a tensor.")
    return (kwargs[names[0]],), {key: value for key, value in kwargs.items() if key != names[0]}

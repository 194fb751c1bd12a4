"""Who handles which operation on logits that are cut along the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Takes the operation, its arguments and its keyword arguments; `NotImplemented` stands for "not with these"."""

_H = TypeVar("_H", bound=Handler)

OPERATIONS: dict[Any, Handler] = {}
"""By operation of `torch.ops.aten`: below autograd, whose own formulas give the gradients."""

CALLS: dict[Any, Handler] = {}
"""By function of PyTorch as a person calls it: above autograd, for what needs a gradient of its own."""


def handles(*operations: Any) -> Callable[[_H], _H]:
    """Registers the decorated function for operations of `torch.ops.aten`."""

    def register(handler: _H) -> _H:
        OPERATIONS.update(dict.fromkeys(operations, handler))
        return handler

    return register


def answers(*functions: Any) -> Callable[[_H], _H]:
    """Registers the decorated function for functions of PyTorch."""

    def register(handler: _H) -> _H:
        CALLS.update(dict.fromkeys(functions, handler))
        return handler

    return register


def by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of an operation of `torch.ops.aten` in the order of its signature, those that were not given, too."""
    arguments = func._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    return {argument.name: given.get(argument.name, argument.default_value) for argument in arguments}

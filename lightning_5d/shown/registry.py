"""Who handles which operation on tensors of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Takes the operation, its arguments and its keyword arguments; `NotImplemented` stands for "not with these"."""

_H = TypeVar("_H", bound=Handler)


class Registry:
    """The handlers of one kind of tensor.

    Attributes:
        operations: By operation of `torch.ops.aten`: below autograd, whose own formulas give the gradients.
        calls: By function of PyTorch as a person calls it: above autograd, for what needs a gradient of its own.

    Args:
        parent: Its handlers are taken where there are none.
    """

    def __init__(self, parent: Registry | None = None) -> None:
        self.operations: dict[Any, Handler] = {}
        self.calls: dict[Any, Handler] = {}
        self._parent = parent

    def operation(self, func: Any) -> Handler | None:
        """Who handles an operation of `torch.ops.aten`."""
        handler = self.operations.get(func)
        return self._parent.operation(func) if handler is None and self._parent is not None else handler

    def call(self, func: Any) -> Handler | None:
        """Who handles a function of PyTorch."""
        handler = self.calls.get(func)
        return self._parent.call(func) if handler is None and self._parent is not None else handler

    def handles(self, *operations: Any) -> Callable[[_H], _H]:
        """Registers the decorated function for operations of `torch.ops.aten`."""

        def register(handler: _H) -> _H:
            self.operations.update(dict.fromkeys(operations, handler))
            return handler

        return register

    def answers(self, *functions: Any) -> Callable[[_H], _H]:
        """Registers the decorated function for functions of PyTorch."""

        def register(handler: _H) -> _H:
            self.calls.update(dict.fromkeys(functions, handler))
            return handler

        return register


EVERY = Registry()
"""What is done alike on every kind of tensor."""


def by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of an operation of `torch.ops.aten` in the order of its signature, those that were not given, too."""
    arguments = func._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    return {argument.name: given.get(argument.name, argument.default_value) for argument in arguments}

"""What takes the place of a module's ``forward`` on that one object: class, names and hooks of the module stay."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, Self

from torch import nn


class ReplacedForward:
    """The base of those who do.

    Args:
        module: The module.

    Attributes:
        module: The module.
        previous: What another one has put into the same place before; ``None`` if the module's class has the original.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.previous: Callable[..., Any] | None = module.__dict__.get("forward")

    @property
    def __signature__(self) -> inspect.Signature:
        """The original's, for those who look at what a forward takes."""
        return inspect.signature(self.original)

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that this one stands for."""
        # Looked up late: FSDP2 gives the module another class after this object was made.
        found: Callable[..., Any] = self.previous or type(self.module).forward.__get__(self.module)
        return found

    def take_off(self) -> None:
        """Gives the module the forward that it had before, unless somebody else has put one around this one."""
        if self.module.__dict__.get("forward") is not self:
            return
        del self.module.__dict__["forward"]
        if self.previous is not None:
            self.module.__dict__["forward"] = self.previous


class AroundForward(ReplacedForward):
    """One that runs the original with something around it, and is copied together with its module."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the forward that this one stands for."""
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        # Not through a bound method: `torch.compile`, where it leaves a frame, takes that for the module's present forward.
        return type(self.module).forward(self.module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = copy.copy(self)
        memo[id(self)] = new
        new.module = copy.deepcopy(self.module, memo)
        new.previous = copy.deepcopy(self.previous, memo)
        return new

    def __copy__(self) -> Self:
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

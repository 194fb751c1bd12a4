"""Gradients that are there before Lightning clears those of the last step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn


class SetAside:
    """Keeps a step's gradients out of the way until the old ones have been cleared.

    Args:
        parameters: The parameters as the optimizer sees them.
        keep: Whether the old gradients come back until they are cleared, at the cost of their memory. Otherwise they are dropped
            when the step begins.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], keep: bool) -> None:
        self._parameters = [
            parameter for parameter in parameters if parameter.requires_grad or parameter.grad is not None
        ]
        self._held: list[Tensor | None] = [parameter.grad if keep else None for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def swap(self) -> None:
        """After the step's backwards: the new gradients go aside, the old ones come back."""
        new = [parameter.grad for parameter in self._parameters]
        for parameter, old in zip(self._parameters, self._held, strict=True):
            parameter.grad = old
        self._held = new

    def put_back(self, owners: Callable[[Tensor], int]) -> None:
        """After clearing: the new gradients take their place, added to what was not cleared.

        Args:
            owners: How many ranks will add their gradients of a parameter up. Each has all of what was not cleared.
        """
        for parameter, gradient in zip(self._parameters, self._held, strict=True):
            kept = parameter.grad
            if kept is not None and (count := owners(parameter)) > 1:
                kept = kept / count  # also where this rank adds nothing to it: the others do
            parameter.grad = gradient if kept is None else kept if gradient is None else kept + gradient
        self._held = [None] * len(self._parameters)

"""Which tokens a rank counts where several see the same ones, and sums over the ranks that see others."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Literal, Protocol, cast

from torch import Tensor, nn

Scope = Literal["microbatch", "global"]
"""Whose tokens a balance loss is about: those of one microbatch of one data rank, or of all data ranks together."""


class Counted:
    """One process: it counts every row that a router sees. Axes put others in its place, see `MoE.counted`.

    [Note: rows of a router]
    A router sees rows of a microbatch. Along a data axis other ranks have other microbatches. Along the context axis ranks have other tokens
    of the same one, perhaps with padding. Along the tensor axis they have the same rows, or with sequence parallelism other tokens. Sums here
    take each token once. What is summed with gradients is a loss that all ranks of the microbatch then have alike.
    """

    @property
    def differing(self) -> Hashable:
        """Which ranks had different rows when the router ran last: what is said of rows of one kind can be summed over ranks at once."""
        return None

    def real(self, rows: int) -> Tensor | None:
        """Which of so many rows are tokens and not padding, as booleans (N,); ``None`` where all are."""
        return None

    def sum(self, x: Tensor, scope: Scope) -> Tensor:
        """The sum of a tensor over the ranks of that scope, each token's rank once; without gradients."""
        return x

    def sum_of_holders(self, x: Tensor) -> Tensor:
        """The sum over ranks that hold the same router for other microbatches of a step, of what each counted in it; without gradients."""
        return x

    def sum_of_microbatch(self, x: Tensor) -> Tensor:
        """The sum over the ranks that have parts of one microbatch, with gradients: each rank gets those of its own part."""
        return x


class Counting(Protocol):
    """A module that counts tokens, or has means over them in a loss."""

    counted: Counted


def counting_modules(module: nn.Module) -> Iterator[Counting]:
    """Those inside of a module."""
    for inner in module.modules():
        if isinstance(inner.__dict__.get("counted"), Counted):
            yield cast(Counting, inner)

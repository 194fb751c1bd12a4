"""Layers that have some of the rows of a weight, whose outputs are summed over the ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal, Self

from torch import Tensor, nn
from typing_extensions import override

from lightning_5d.tensor_parallel.arguments import first_positional
from lightning_5d.tensor_parallel.axis import TensorAxis
from lightning_5d.tensor_parallel.columns import Doors
from lightning_5d.tensor_parallel.forwards import (
    Forward,
    LinearForward,
    multiplied,
    uncompiled,
)
from lightning_5d.tensor_parallel.pieces import Pieces
from lightning_5d.tensor_parallel.regions import join, leave, row, take
from lightning_5d.tensor_parallel.sequence import SequenceCut


class RowForward(LinearForward):
    """A row layer: its output is summed over the ranks, then the bias is added.

    Args:
        module: A linear layer.
        axis: The ranks.
        sequence: Where the sequence is cut.
        doors: The region's, where it has some.
        split: Its input has all features, of which it takes its own: ``"inside"`` a region, where the sequence is whole, or
            ``"outside"``.
    """

    def __init__(
        self,
        module: nn.Module,
        axis: TensorAxis,
        sequence: SequenceCut | None,
        doors: Doors | None = None,
        *,
        split: Literal["inside", "outside"] | None = None,
    ) -> None:
        super().__init__(module, axis, sequence)
        self._doors, self._split = doors, split

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        (x, *rest), names = first_positional(self.module, args, kwargs)
        if rest or names:
            raise TypeError(f"A row layer takes one tensor, and got {len(rest) + len(names)} more arguments.")
        if self._doors is not None:
            self._doors.forget()
        return uncompiled(self._run, x)

    def _run(self, x: Tensor) -> Tensor:
        if self._split is not None:
            x = self._own_features(x)
        pieces = None if self.sequence is None else self.sequence.pieces_of_whole(x)
        layer, (weight, bias) = self.layer, self.weight_and_bias()
        if layer is not None and self.plain(x) and x.dtype == weight.dtype:
            return row(x, weight, bias, layer, self.axis, pieces)
        module: Any = self.module
        out = leave(multiplied(module, x, module.weight), self.axis, pieces)
        return out if module.bias is None else out + module.bias.to(out.dtype)

    def _own_features(self, x: Tensor) -> Tensor:
        if self._split == "outside" and self.sequence is not None:
            x = join(x, self.sequence.pieces(x))
        return take(x, Pieces(self.axis, x.ndim - 1, x.shape[-1]))


class RowsInsideForward(Forward):
    """A module around a row layer, such as an adapter: what leaves it is the sum over the ranks.

    Args:
        module: The module.
        axis: The ranks.
        sequence: Where the sequence is cut.
        inner: The row layers inside, whose biases are added at the end.
        doors: The region's, where it has some.
    """

    def __init__(
        self,
        module: nn.Module,
        axis: TensorAxis,
        sequence: SequenceCut | None,
        inner: Sequence[nn.Module],
        doors: Doors | None = None,
    ) -> None:
        super().__init__(module, axis, sequence)
        self._inner, self._doors = tuple(inner), doors

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = super().__deepcopy__(memo)
        new._inner = tuple(copy.deepcopy(module, memo) for module in self._inner)
        return new

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._doors is not None:
            self._doors.forget()
        return uncompiled(self._leave, self.run(*args, **kwargs))

    def _leave(self, partial: Tensor) -> Tensor:
        pieces = None if self.sequence is None else self.sequence.pieces_of_whole(partial)
        out = leave(partial, self.axis, pieces)
        for module in self._inner:
            bias: Any = module.bias
            if bias is not None:
                out = out + bias.to(out.dtype)
        return out


class BiaslessForward(Forward):
    """A row layer inside of a module that adds its bias later."""

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        (x, *_), _ = first_positional(self.module, args, kwargs)
        return multiplied(self.module, x, self.module.weight)

"""Where tensors come into regions, and into and out of what has pieces of the sequence."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_5d.pipeline_parallel.containers import rebuilt
from lightning_5d.tensor_parallel.arguments import argument, door_of, with_argument
from lightning_5d.tensor_parallel.axis import TensorAxis
from lightning_5d.tensor_parallel.columns import parameters_of
from lightning_5d.tensor_parallel.forwards import (
    Forward,
    nothing,
    uncompiled,
)
from lightning_5d.tensor_parallel.regions import enter
from lightning_5d.tensor_parallel.sequence import SequenceCut, marked
from lightning_5d.whole_length import length_on, mark


class RegionForward(Forward):
    """A module whose input is entered at its door.

    The first tensor, or ``hidden_states``, is the one that is whole on all ranks or cut along the sequence. Others that need
    gradients come from outside as well, whole.

    Args:
        module: The module.
        axis: The ranks.
        sequence: Where the sequence is cut.
        columns: Its column layers.
    """

    def __init__(
        self, module: nn.Module, axis: TensorAxis, sequence: SequenceCut | None, columns: Sequence[nn.Module]
    ) -> None:
        super().__init__(module, axis, sequence)
        self._columns = tuple(columns)

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = super().__deepcopy__(memo)
        new._columns = tuple(copy.deepcopy(module, memo) for module in self._columns)
        return new

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_columns": ()}

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = uncompiled(self._enter, args, kwargs)
        return self.run(*args, **kwargs)

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        place = door_of(args, kwargs)
        if place is None:
            raise ValueError(
                f"{type(self.module).__name__} got no tensor to enter its region with, neither as its first argument nor as hidden_states."
            )
        x = argument(args, kwargs, place)
        pieces = None if self.sequence is None else self.sequence.pieces(x)
        inside = enter(x, self.axis, pieces, parameters_of(self._columns))

        def entered(value: Any) -> Any:
            if value is x:
                return inside
            other = isinstance(value, Tensor) and value.requires_grad and value.is_floating_point()
            return enter(value, self.axis) if other else value

        return tuple(map(entered, args)), {name: entered(value) for name, value in kwargs.items()}


class BlockForward(Forward):
    """A block, or a module inside of one, that runs on a piece of the sequence."""

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.sequence is None or (place := door_of(args, kwargs)) is None:
            return self.run(*args, **kwargs)
        x = argument(args, kwargs, place)
        piece = uncompiled(self.sequence.cut_if_whole, x)
        if piece is not x:
            args, kwargs = with_argument(args, kwargs, place, piece)
        before, length = uncompiled(self.sequence.begin, piece)
        try:
            output = self.run(*args, **kwargs)
        finally:
            uncompiled(self.sequence.end, before)
        return uncompiled(marked, output, piece, length)


class CutHook:
    """Comes before the first block, with the whole sequence."""

    def __init__(self, sequence: SequenceCut) -> None:
        self._sequence = sequence

    def __deepcopy__(self, memo: dict[int, Any]) -> CutHook:
        return self

    def __reduce__(self) -> Any:
        return nothing, ()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cuts the first tensor."""
        place = door_of(args, kwargs)
        if place is None:
            return None
        return with_argument(args, kwargs, place, self._sequence.cut(argument(args, kwargs, place)))


class WholeHook(CutHook):
    """Comes behind the last module that has pieces of the sequence."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Makes the first tensor whole."""
        first = output[0] if isinstance(output, tuple | list) else output
        place = door_of(args, kwargs)
        if place is not None and length_on(first) is None:
            length = length_on(argument(args, kwargs, place))
            if length is not None:
                mark(first, length)
        whole = self._sequence.whole(first)
        return rebuilt(output, {**dict(enumerate(output)), 0: whole}) if isinstance(output, tuple | list) else whole


class NoteHook(CutHook):
    """Notes the length on the input of a region, where a recomputation of the region finds it."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes it."""
        place = door_of(args, kwargs)
        if place is not None:
            x = argument(args, kwargs, place)
            mark(x, self._sequence.pieces(x).whole)

"""What the code between the layers of a region does with features of which a rank has a part.

A mean over features, a reshape that does not keep heads together, a number made of a width, an input that goes past the layers: none
of it fails on a part, and all of it computes something else. A region that runs once as it was and once as it is, both without
values, takes the same operations; what differs in their shapes is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_5d.tensor_parallel.running import calling_line
from lightning_5d.tensor_parallel.sequence_mixing import DIMENSION
from lightning_5d.tensor_parallel.weight_uses import OF_SHAPE

Shape = tuple[int, ...]

_ENTERED, _CUT, _SUM = "entered", "cut", "sum"
_PRODUCTS = frozenset(["matmul", "__matmul__", "bmm", "mm", "linear"])
_VIEWS = frozenset(["view", "reshape", "unflatten"])
_ARITHMETIC = frozenset(
    [
        "add",
        "sub",
        "mul",
        "div",
        "pow",
        "rsub",
        "true_divide",
        "multiply",
        "divide",
        "__add__",
        "__radd__",
        "__sub__",
        "__rsub__",
        "__mul__",
        "__rmul__",
        "__pow__",
        "__rpow__",
        "__truediv__",
        "__rtruediv__",
    ]
)


@dataclass(frozen=True)
class Operation:
    """One operation of a region.

    Attributes:
        name: What it is called.
        input: Shape of its first tensor.
        output: Shape of what comes of it.
        over: Dimensions of the input over which it adds up, compares or normalises.
        numbers: Numbers that it computes with.
        line: Where it is called.
    """

    name: str
    input: Shape
    output: Shape
    over: frozenset[int]
    numbers: frozenset[float]
    line: str | None


class Trace(TorchFunctionMode):
    """Writes down what a region does between its layers.

    Args:
        layers: Its column layers (``True``) and row layers (``False``); what they do is theirs.
        partial: Names of its whole weights of whose gradients each rank is taken to have a summand.
        doors: It is entered at its own door, so that gradients of what enters there are added up.
    """

    def __init__(self, layers: Mapping[nn.Module, bool], partial: Collection[str] = (), doors: bool = False) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.finding: str | None = None
        self._layers, self._partial, self._doors = layers, frozenset(partial), doors
        self._weights: dict[int, str] = {}
        self._within = 0
        self._marks: dict[int, tuple[Tensor, frozenset[str]]] = {}

    def follow(self, region: nn.Module) -> list[Any]:
        """Puts hooks on the layers, which have to be removed, and notes which weights the region has."""
        parameters = region.named_parameters(remove_duplicate=False)
        self._weights = {id(weight): name for name, weight in parameters if name in self._partial}
        handles: list[Any] = []
        for layer, is_column in self._layers.items():
            if type(layer) is nn.Linear and "forward" not in vars(layer):
                handles.append(_Shapes(layer))
            handles.append(layer.register_forward_pre_hook(self._before_layer, with_kwargs=True))
            handles.append(layer.register_forward_hook(partial(self._behind_layer, is_column)))
        return handles

    def entered(self, x: Any) -> None:
        """Marks what comes in at the door."""
        if self._doors and isinstance(x, Tensor):
            self._mark(x, frozenset([_ENTERED]))

    def returned(self, output: Any) -> None:
        """Looks at what leaves the region."""
        if any(_ENTERED in self._of(leaf) for leaf in tree_leaves(output)):
            self._find("returns what it is given without sending it through its layers", None)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation."""
        kwargs = kwargs or {}
        shapes = [leaf.shape for leaf in tree_leaves(args[:1]) if isinstance(leaf, Tensor)]
        output = func(*args, **kwargs)
        if self._within:
            return output
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        name = getattr(func, "__name__", "").removesuffix("_") if not _is_dunder(func) else func.__name__
        if not outputs or name in OF_SHAPE or name in ("detach", "__set__"):
            return output
        if self._doors:
            self._look(name, args, kwargs, outputs)
        first = tuple(shapes[0]) if shapes else ()
        self.operations.append(
            Operation(
                name,
                first,
                tuple(outputs[0].shape),
                frozenset(_over(name, args, kwargs, first)),
                frozenset(_numbers(name, args, kwargs)),
                calling_line(),
            )
        )
        return output

    def _look(self, name: str, args: Any, kwargs: Any, outputs: Sequence[Tensor]) -> None:
        marks = frozenset[str]().union(*(self._of(leaf) for leaf in tree_leaves((args, kwargs))))
        if _SUM in marks and _CUT not in marks:
            if _ENTERED in marks:
                self._find(
                    f"puts its own input together with the output of its last layer ({name})", calling_line(),
                )  # fmt: skip
            for weight in sorted(marks - {_SUM, _ENTERED}):
                self._find(f"uses {weight} on the output of its last layer ({name})", calling_line())
            marks = frozenset([_SUM])
        for output in outputs:
            if output.is_floating_point():
                self._mark(output, marks)

    def _before_layer(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        is_entry = not self._within and self._layers[layer] and self._doors
        if is_entry and any(_SUM in self._of(leaf) for leaf in tree_leaves((args, kwargs))):
            self._find("sends the output of one of its layers through another that is cut by its outputs", None)
        self._within += 1

    def _behind_layer(self, is_column: bool, layer: nn.Module, args: Any, output: Any) -> None:
        self._within -= 1
        if self._doors and isinstance(output, Tensor):
            self._mark(output, frozenset([_CUT if is_column else _SUM]))

    def _mark(self, x: Tensor, marks: frozenset[str]) -> None:
        self._marks[id(x)] = (x, marks)  # held, or another tensor may get the same id

    def _of(self, leaf: Any) -> frozenset[str]:
        if not isinstance(leaf, Tensor):
            return frozenset()
        if id(leaf) in self._weights:
            return frozenset([self._weights[id(leaf)]])
        return self._marks[id(leaf)][1] if id(leaf) in self._marks else frozenset()

    def _find(self, what: str, line: str | None) -> None:
        if self.finding is None:
            self.finding = what + (f", {line}" if line else "")


class _Shapes:
    """Runs a linear layer without its operations, which are most of a region's and which nobody looks at. Without values only.

    Args:
        layer: The layer, until `remove`.
    """

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        layer.forward = self._forward  # type: ignore[method-assign]

    def remove(self) -> None:
        """Gives the layer its own forward back."""
        del self._layer.forward

    def _forward(self, input: Tensor) -> Tensor:
        weight = self._layer.weight
        fits = input.shape[-1:] == weight.shape[1:] and input.dtype == weight.dtype and input.device == weight.device
        if fits and not torch.is_autocast_enabled(input.device.type):
            return input.new_empty((*input.shape[:-1], weight.shape[0]))
        return nn.Linear.forward(self._layer, input)  # it fails, or makes another dtype


def different(whole: Sequence[Operation], cut: Sequence[Operation]) -> str | None:
    """What a region does differently on its part of the features; ``None`` if nothing is seen.

    Args:
        whole: Of the whole region.
        cut: Of this rank's part of it. Where it takes another way than the whole, nothing more can be seen.
    """
    for one, part in zip(whole, cut, strict=False):
        if one.name != part.name or len(one.input) != len(part.input):
            return None
        where = f" ({one.name}{f', {part.line}' if part.line else ''})"
        over = [dim for dim in sorted(one.over) if one.input[dim] != part.input[dim]]
        if over:
            dim = over[-1]
            return f"adds up, compares or normalises over {one.input[dim]} features or heads, of which it has {part.input[dim]}{where}"
        if not part.numbers <= one.numbers:
            here, there = (", ".join(f"{n:g}" for n in sorted(x)) for x in (part.numbers - one.numbers, one.numbers - part.numbers))  # fmt: skip
            return f"computes with {here} where the whole module computes with {there or 'something else'}{where}"
        if one.name in _VIEWS and _torn(one, part):
            return f"reshapes {part.input} to {part.output}, where the whole module makes {one.output} of {one.input}{where}"
    return None


def _torn(one: Operation, part: Operation) -> bool:
    """Whether a reshape of the last dimension has cut heads in parts: what is cut has to come first in it."""
    if len(one.output) != len(part.output) or not one.input or one.input[-1] == part.input[-1]:
        return False
    product, start = 1, len(one.output)
    while start and product < one.input[-1]:
        start -= 1
        product *= one.output[start]
    if product != one.input[-1] or start == len(one.output) - 1:
        return False  # it puts dimensions together
    dims = [i for i in range(start, len(one.output)) if one.output[i] != 1]
    is_cut = [one.output[i] != part.output[i] for i in dims]
    while is_cut and not is_cut[0] and one.output[dims[0]] in (2, 3) and len(is_cut) > 2:
        del is_cut[0], dims[0]  # queries, keys and values in one
    return any(later and not before for before, later in pairwise(is_cut))


def _over(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], shape: Shape) -> Iterator[int]:
    rank = len(shape)
    if not rank:
        return
    if name in ("layer_norm", "rms_norm"):
        sizes = args[1] if len(args) > 1 else kwargs["normalized_shape"]
        yield from range(rank - (1 if isinstance(sizes, int) else len(sizes)), rank)
    elif name in _PRODUCTS:
        yield rank - 1
    elif name == "normalize":
        yield kwargs.get("dim", args[2] if len(args) > 2 else 1) % rank
    elif name in DIMENSION or name == "linalg_vector_norm":
        place = DIMENSION.get(name, 2)
        given = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else None))
        if isinstance(given, Tensor) or "other" in kwargs:
            return
        every = name not in ("roll", "flip", "diff", "sort", "argsort", "topk")
        dims = (range(rank) if every else [rank - 1]) if given is None else given if isinstance(given, tuple | list) else [given]  # fmt: skip
        yield from (dim % rank for dim in dims if isinstance(dim, int) and not isinstance(dim, bool))


def _numbers(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[float]:
    for leaf in tree_leaves((args, kwargs)):
        of_kind = isinstance(leaf, float) or (
            name in _ARITHMETIC and isinstance(leaf, int) and not isinstance(leaf, bool)
        )
        if of_kind and math.isfinite(leaf):
            yield float(leaf)


def _is_dunder(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name.startswith("__") and name.endswith("__")

"""A tensor that shows a whole and holds the part of one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn, Self, TypeVar, cast

import torch
import torch._dynamo.config
from torch import Tensor
from typing_extensions import override

from lightning_5d.shown.arguments import tensors_in, with_tensors
from lightning_5d.shown.registry import Registry
from lightning_5d.tensor_parallel.axis import Reduction, TensorAxis

# [Note: one program, two kinds of tensors]
# All ranks run the user's same program. A shown tensor stands for a whole one of which each rank holds a part; a plain tensor
# next to it is the same on all ranks. Autograd records operations on the *whole* tensors, in C++, with its own formulas, and a
# gradient is again one of the two kinds, whichever the formula's operations give. Where a graph changes from one kind to the
# other its gradient is gathered or cut, so it never has to be known which sums over ranks a formula needs.
# Below autograd, `__torch_dispatch__` gets each single operation and runs it on the part that this rank holds.
# A part may itself be a shown tensor of a lower level, of another axis: logits whose tokens and whose columns are cut. To those of
# the higher level it is like a plain tensor, the same on all ranks of *their* axis.

_F = TypeVar("_F", bound=Callable[..., Any])


def untraced(function: _F) -> _F:
    """Keeps compiled functions from following one rank into what happens between ranks."""
    return cast(_F, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


class ShownTensor(Tensor):
    """A tensor of which this rank holds a part along one dimension, an ordinary one to whoever uses it.

    Attributes:
        local: What this rank holds; without a graph.
        axis: The ranks that hold the other parts.
        cut_dim: The dimension of which each rank holds a part.
        registry: Who handles what. Set by each kind.
        level: Of two kinds, the one with the higher level handles operations on both, and may hold the other.
        made_whole: What is said when an operation gathers it; with a place for the number of ranks.
        never_whole: What is said to be done without that.
    """

    local: Tensor
    axis: TensorAxis
    cut_dim: int
    registry: ClassVar[Registry]
    level: ClassVar[int]
    made_whole: ClassVar[str]
    never_whole: ClassVar[str]

    @classmethod
    def show(cls, local: Tensor, shape: Sequence[int], axis: TensorAxis, cut_dim: int) -> Self:
        """A tensor of that shape, without a graph."""
        # Private; checked with torch 2.13. It is what tensors without memory of their own (DTensor) are made with.
        shown: Self = Tensor._make_wrapper_subclass(
            cls, shape, strides=dense(shape, local.stride()), dtype=local.dtype, device=local.device
        )
        shown.local, shown.axis, shown.cut_dim = local, axis, cut_dim
        return shown

    @property
    def held(self) -> int:
        """How many entries along `cut_dim` this rank holds, without padding; may be none."""
        raise NotImplementedError

    @property
    def held_part(self) -> Tensor:
        """`local` without padding."""
        raise NotImplementedError

    def gathered(self) -> Tensor:
        """The whole, without a graph, the same on all ranks of the axis. All of them have to call it."""
        raise NotImplementedError

    def like(self, local: Tensor, dim: int | None = None) -> Self:
        """A tensor that is cut in the same way with other contents, without a graph; `local` is padded in the same way, too."""
        raise NotImplementedError

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """Of a whole tensor, as long along `dim` as this one along `cut_dim`, what this rank holds, padded as `local`."""
        raise NotImplementedError

    def matches(self, other: Self) -> bool:
        """Whether each rank holds the same entries of both, whatever their number of dimensions."""
        raise NotImplementedError

    def statistic(self, reduced: Tensor, dim: int) -> Tensor:
        """What a reduction over other dimensions leaves, cut along `dim`."""
        return self.like(reduced, dim)

    @untraced
    def whole(self) -> Tensor:
        """The whole, gathered, with a graph. All ranks of the axis have to call it."""
        return cast(Tensor, _MakeWhole.apply(self))  # type: ignore[no-untyped-call]

    def local_shape(self, shape: Sequence[int], dim: int) -> list[int]:
        """The shape of a part of something whole."""
        return [self.local.shape[self.cut_dim] if d == dim else size for d, size in enumerate(shape)]

    def summed(self, x: Tensor, reduction: Reduction = "sum") -> Tensor:
        """The sum (or largest) over the ranks of the axis."""
        return over_ranks(self.axis, x, reduction)

    def collected(self, x: Tensor) -> Tensor:
        """What all ranks of the axis have, in a new first dimension."""
        return gathered_over(self.axis, x[None], 0)

    @classmethod
    @override
    @untraced
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(types) > 1 and _outranked(cls, types):
            return NotImplemented
        kwargs = kwargs or {}
        if getattr(func, "__name__", None) == "__get__":  # an attribute, of which there are many
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        handler = cls.registry.call(func)
        if handler is not None:
            result = handler(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if torch.is_grad_enabled() and not _keeps_arguments(func):
            args, kwargs = with_tensors((args, kwargs), lambda value: _guard(cls, value))
        # Private; checked with torch 2.13. The public default would turn every result into this class.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Runs one operation below autograd."""
        from lightning_5d.shown.elementwise import elementwise, is_elementwise
        from lightning_5d.shown.made_whole import run_whole

        if len(types) > 1 and _outranked(cls, types):
            return NotImplemented
        kwargs = kwargs or {}
        shown = [leaf for leaf in tensors_in((args, kwargs)) if isinstance(leaf, cls)]
        if any(one.axis is not shown[0].axis for one in shown):
            raise ValueError(f"{func} got tensors that are cut over two different axes.")
        handler = cls.registry.operation(func) or (elementwise if is_elementwise(func) else None)
        result = NotImplemented if handler is None else handler(func, args, kwargs)
        if result is NotImplemented and handler is None:
            # In inference mode operations come here that autograd would have taken apart.
            result = func.decompose(*args, **kwargs)
        return run_whole(cls, func, args, kwargs) if result is NotImplemented else result

    @override
    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"Rank {self.axis.rank} {self.holding()}, so it cannot save or send them by itself. Call .whole() on every rank and save"
            " the result, or save what is made of them (argmax, loss)."
        )

    def holding(self) -> str:
        """``"holds 4 of the 7 columns of these logits"``."""
        raise NotImplementedError


def first_shown(args: Any) -> ShownTensor:
    """The tensor that an operation is handled for: the first of the highest level."""
    shown = [leaf for leaf in tensors_in(args) if isinstance(leaf, ShownTensor)]
    return max(shown, key=lambda one: one.level)


def over_ranks(axis: TensorAxis, x: Tensor, reduction: Reduction = "sum") -> Tensor:
    """The sum (or largest) over the ranks of an axis of plain tensors, or of shown ones of another axis."""
    return x.like(axis.sum(x.local, reduction)) if isinstance(x, ShownTensor) else axis.sum(x, reduction)


def gathered_over(axis: TensorAxis, x: Tensor, dim: int) -> Tensor:
    """The parts of all ranks of an axis, one after the other along `dim`, plain or shown ones of another axis."""
    if isinstance(x, ShownTensor):
        return x.like(axis.gather(x.local, dim))
    return axis.gather(x, dim)


class _MakeWhole(torch.autograd.Function):
    """The whole; backward: the same gradient, of which each rank will need its own part."""

    @staticmethod
    @override
    def forward(ctx: Any, shown: ShownTensor) -> Tensor:
        return shown.gathered()

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Guard(torch.autograd.Function):
    """A plain tensor as it is; backward: its gradient, made whole where it comes in parts."""

    @staticmethod
    @override
    def forward(ctx: Any, kind: type[ShownTensor], plain: Tensor) -> Tensor:
        ctx.kind = kind
        return plain.view_as(plain)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad.gathered() if isinstance(grad, ctx.kind) else grad


def _guard(kind: type[ShownTensor], value: Tensor) -> Any:
    """Sees to it that a plain tensor, a weight for example, gets a plain gradient."""
    plain = not isinstance(value, kind) and value.requires_grad
    return _Guard.apply(kind, value) if plain else value  # type: ignore[no-untyped-call]


def _outranked(kind: type[ShownTensor], types: Any) -> bool:
    return any(issubclass(other, ShownTensor) and other.level > kind.level for other in types)


def _keeps_arguments(func: Any) -> bool:
    """Whether a function needs its very arguments: it writes to them or asks for their gradients."""
    name = str(getattr(func, "__name__", ""))
    in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"
    return in_place or name in ("grad", "backward", "__set__", "__get__", "register_hook")


def dense(shape: Sequence[int], local_strides: Sequence[int]) -> list[int]:
    """Strides without holes whose dimensions have the order of those that `local` has."""
    order = sorted(range(len(shape)), key=lambda d: (-local_strides[d], d))
    return [math.prod(shape[other] for other in order[order.index(d) + 1 :]) for d in range(len(shape))]


def never_traced(kind: type[ShownTensor]) -> None:
    """Lets a compiled function leave these tensors to Python: to trace them would follow one rank's collectives and lose the graph."""
    torch._dynamo.config.nontraceable_tensor_subclasses.add(kind)

"""A tensor that shows all columns of the logits and holds those of one rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch._dynamo.config
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from lightning_5d.tensor_parallel.axis import TensorAxis
from lightning_5d.tensor_parallel.vocabulary.registry import CALLS, OPERATIONS

# [Note: one program, two kinds of tensors]
# All ranks run the user's same program. A `VocabularyShard` stands for a whole tensor of which each rank holds some columns; a
# plain tensor next to it is the same on all ranks. Autograd records operations on the *whole* tensors, in C++, with its own
# formulas, and a gradient is again one of the two kinds, whichever the formula's operations give. Where a graph changes from one
# kind to the other its gradient is gathered or cut, so it never has to be known which sums over ranks a formula needs.
# Below autograd, `__torch_dispatch__` gets each single operation and runs it on the columns that this rank holds.


_F = TypeVar("_F", bound=Callable[..., Any])


def _untraced(function: _F) -> _F:
    """Keeps compiled functions from following one rank into what happens between ranks."""
    return cast(_F, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


class VocabularyShard(Tensor):
    """Logits (..., V) of which this rank holds n columns, an ordinary tensor to whoever uses it.

    Operations on leading dimensions and elementwise ones stay local. Those along the vocabulary that losses and metrics are
    made of (`F.cross_entropy`, `softmax`, `logsumexp`, `argmax`, `topk`, `gather`, sums) exchange a few numbers per token, and
    their results without a vocabulary are plain tensors, equal on all ranks. Anything else gathers the logits, is right, and
    says so once. All ranks must call such operations, as they do when they run the same step.

    Attributes:
        local: The columns this rank holds, padding included; without a graph.
        axis: The ranks that hold the others.
        vocabulary: V.
        vocabulary_dim: Which dimension the vocabulary is.
    """

    local: Tensor
    axis: TensorAxis
    vocabulary: int
    vocabulary_dim: int

    @staticmethod
    def __new__(cls, local: Tensor, axis: TensorAxis, vocabulary: int, dim: int) -> VocabularyShard:
        """See `wrap`; this one makes no graph."""
        shape = [vocabulary if d == dim else size for d, size in enumerate(local.shape)]
        # Private; checked with torch 2.13. It is what tensors without memory of their own (DTensor) are made with.
        shard: VocabularyShard = Tensor._make_wrapper_subclass(
            cls, shape, strides=_dense(shape, local.stride()), dtype=local.dtype, device=local.device
        )
        shard.local, shard.axis, shard.vocabulary, shard.vocabulary_dim = local, axis, vocabulary, dim
        return shard

    @classmethod
    @_untraced
    def wrap(cls, local: Tensor, *, vocabulary: int, axis: TensorAxis) -> VocabularyShard:
        """Shows this rank's columns as the whole logits.

        Args:
            local: Shape (..., n), any floating dtype, with its graph. Rank r has columns r*n to (r+1)*n. Columns from
                `vocabulary` on are padding: they have no probability and get no gradient, whatever their values are.
            vocabulary: Number of columns of the whole logits, V.
            axis: The ranks that hold the other columns, all with tensors of the same shape.

        Raises:
            ValueError: If the ranks hold fewer columns than there are.
        """
        width = local.shape[-1] if local.ndim else 0
        if not 1 <= vocabulary <= width * axis.size:
            raise ValueError(
                f"{axis.size} ranks with {width} columns each hold {axis.size * width}, the vocabulary has {vocabulary};"
                f" each rank needs {-(-vocabulary // axis.size)} at least."
            )
        return cast(VocabularyShard, _Show.apply(local, axis, vocabulary, local.ndim - 1))  # type: ignore[no-untyped-call]

    @property
    def width(self) -> int:
        """Columns that each rank holds, padding included."""
        return self.local.shape[self.vocabulary_dim]

    @property
    def start(self) -> int:
        """This rank's first column in the whole logits."""
        return self.axis.rank * self.width

    @property
    def held(self) -> int:
        """Columns that this rank holds, without padding; may be none."""
        return self.held_by(self.axis.rank)

    def held_by(self, rank: int) -> int:
        """Columns that a rank holds, without padding."""
        return max(0, min(self.width, self.vocabulary - rank * self.width))

    @property
    def columns(self) -> Tensor:
        """`local` without padding."""
        return self.local if self.held == self.width else self.local.narrow(self.vocabulary_dim, 0, self.held)

    @_untraced
    def whole(self) -> Tensor:
        """All columns, gathered, as a plain tensor with a graph. All ranks have to call it."""
        return cast(Tensor, _MakeWhole.apply(self))  # type: ignore[no-untyped-call]

    def gathered(self) -> Tensor:
        """All columns, gathered, without a graph."""
        return (
            self.axis.gather(self.local, self.vocabulary_dim)
            .narrow(self.vocabulary_dim, 0, self.vocabulary)
            .contiguous()
        )

    def like(self, local: Tensor, dim: int | None = None) -> VocabularyShard:
        """A tensor of the same vocabulary with other contents, without a graph; `local` has padding, too."""
        return VocabularyShard(local, self.axis, self.vocabulary, self.vocabulary_dim if dim is None else dim)

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """Of a whole tensor, with V columns along `dim`, those that this rank holds, and padding."""
        return _part(whole, self.axis, self.vocabulary, dim, self.width)

    def owned(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Where columns of the whole logits are in `local`.

        Returns:
            Places in `local`, and a mask of those columns that other ranks hold, whose places mean nothing.
        """
        place = index - self.start
        absent = (place < 0) | (place >= self.held)
        return place.masked_fill(absent, 0), absent

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        columns = f"{self.start} to {self.start + self.held - 1}" if self.held else "none"
        gradient = f", grad_fn=<{self.grad_fn.name()}>" if self.grad_fn is not None else ""
        return (
            f"VocabularyShard(shape={tuple(self.shape)}, dtype={self.dtype}, columns {columns} of {self.vocabulary} here:"
            f" {self.columns}{gradient})"
        )

    @override
    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"Rank {self.axis.rank} holds {self.held} of the {self.vocabulary} columns of these logits, so it cannot save or send them"
            " by itself. Call logits.whole() on every rank and save the result, or save what is made of them (argmax, loss)."
        )

    @classmethod
    @override
    @_untraced
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = CALLS.get(func)
        if handler is not None:
            result = handler(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if torch.is_grad_enabled() and not _keeps_arguments(func):
            args, kwargs = tree_map(_guard, (args, kwargs))
        # Private; checked with torch 2.13. The public default would turn every result into this class.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Runs one operation below autograd."""
        from lightning_5d.tensor_parallel.vocabulary.elementwise import elementwise, is_elementwise
        from lightning_5d.tensor_parallel.vocabulary.made_whole import run_whole

        kwargs = kwargs or {}
        shards = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, VocabularyShard)]
        if any(shard.axis is not shards[0].axis for shard in shards):
            raise ValueError(f"{func} got logits of two different tensor axes.")
        handler = OPERATIONS.get(func) or (elementwise if is_elementwise(func) else None)
        result = NotImplemented if handler is None else handler(func, args, kwargs)
        if result is NotImplemented and handler is None:
            # In inference mode operations come here that autograd would have taken apart.
            result = func.decompose(*args, **kwargs)
        return run_whole(func, args, kwargs) if result is NotImplemented else result


class _Show(torch.autograd.Function):
    """This rank's columns as the whole; backward: of the whole gradient this rank's columns."""

    @staticmethod
    @override
    def forward(ctx: Any, local: Tensor, axis: TensorAxis, vocabulary: int, dim: int) -> VocabularyShard:
        ctx.placement = axis, vocabulary, dim, local.shape[dim]
        return VocabularyShard(local.detach(), axis, vocabulary, dim)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        axis, vocabulary, dim, width = ctx.placement
        if not isinstance(grad, VocabularyShard) or grad.vocabulary_dim != dim:
            whole = grad.gathered() if isinstance(grad, VocabularyShard) else grad
            return _part(whole, axis, vocabulary, dim, width), None, None, None
        local = grad.local
        if grad.held < width:
            # Nobody sees the padding of a gradient, so that it may be written to.
            local = local.contiguous() if 0 in local.stride() else local
            local.narrow(dim, grad.held, width - grad.held).zero_()
        return local, None, None, None


class _MakeWhole(torch.autograd.Function):
    """All columns; backward: the same gradient, of which each rank will need its own columns."""

    @staticmethod
    @override
    def forward(ctx: Any, shard: VocabularyShard) -> Tensor:
        return shard.gathered()

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Guard(torch.autograd.Function):
    """A plain tensor as it is; backward: its gradient, made whole where it comes in columns."""

    @staticmethod
    @override
    def forward(ctx: Any, plain: Tensor) -> Tensor:
        return plain.view_as(plain)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.gathered() if isinstance(grad, VocabularyShard) else grad


def _guard(value: Any) -> Any:
    """Sees to it that a plain tensor, a weight for example, gets a plain gradient."""
    plain = isinstance(value, Tensor) and not isinstance(value, VocabularyShard) and value.requires_grad
    return _Guard.apply(value) if plain else value  # type: ignore[no-untyped-call]


def _keeps_arguments(func: Any) -> bool:
    """Whether a function needs its very arguments: it writes to them or asks for their gradients."""
    name = str(getattr(func, "__name__", ""))
    in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"
    return in_place or name in ("grad", "backward", "__set__", "__get__", "register_hook")


def _part(whole: Tensor, axis: TensorAxis, vocabulary: int, dim: int, width: int) -> Tensor:
    start = min(axis.rank * width, vocabulary)
    held = min(width, vocabulary - start)
    part = whole.narrow(dim, start, held)
    if held == width:
        return part
    shape = [width - held if d == dim else size for d, size in enumerate(part.shape)]
    return torch.cat([part, part.new_zeros(shape)], dim)


def _dense(shape: list[int], local_strides: tuple[int, ...]) -> list[int]:
    """Strides without holes whose dimensions have the order of those that `local` has."""
    order = sorted(range(len(shape)), key=lambda d: (-local_strides[d], d))
    return [math.prod(shape[other] for other in order[order.index(d) + 1 :]) for d in range(len(shape))]


# A compiled function leaves these tensors to Python: to trace them would follow one rank's collectives and lose the graph.
torch._dynamo.config.nontraceable_tensor_subclasses.add(VocabularyShard)

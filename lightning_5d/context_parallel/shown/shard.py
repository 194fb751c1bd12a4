"""A tensor that shows whole sequences and holds this rank's tokens."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor
from typing_extensions import override

from lightning_5d.context_parallel.shown.placement import Placement, padded
from lightning_5d.context_parallel.shown.registry import SEQUENCE
from lightning_5d.context_parallel.step_sequence import StepSequence
from lightning_5d.shown.tensor import ShownTensor, never_traced, untraced

# See [Note: one program, two kinds of tensors] in `shown/tensor.py`.

# [Note: gradients inside and outside of doors]
# Outside, a gradient is that of the whole, the same on all ranks, or each holds the part of its tokens. Inside, each rank's gradients of
# weights are sums over its tokens, and the data axis averages them over the ranks of `cp` as it does over the batch's parts. So that
# the average is the whole gradient, everything inside is multiplied by the number of ranks: at the exit, on the way back, and divided
# again at the entry. That holds for gradients of gradients, too: the way back from the entry is a way out, through which they come in.


class SequenceShard(ShownTensor):
    """Sequences (B, S, ...) of which this rank holds some tokens, an ordinary tensor to whoever uses it.

    Operations on other dimensions and elementwise ones stay local, as do views that merge tokens with rows, windows
    (``x[:, :-1]``) and masks (``x[mask]``). Sums over tokens, and losses, add up one small tensor over the ranks, and their results are
    plain tensors, equal on all ranks. Anything else gathers the tokens, is right, and says so once. All ranks must call such
    operations, as they do when they run the same step.

    Attributes:
        local: The tokens this rank holds, without padding; without a graph. Plain, or a shown tensor of the tensor axis.
        placement: Which tokens, and where they are.
    """

    registry = SEQUENCE
    level = 1
    made_whole = "a tensor that {} ranks hold the tokens of: it is made whole"
    never_whole = (
        "Losses, sums over tokens, windows of them, masks, elementwise operations and those along other dimensions"
    )

    placement: Placement

    @staticmethod
    def __new__(cls, local: Tensor, placement: Placement) -> SequenceShard:
        """See `wrap`; this one makes no graph."""
        dim = placement.dim
        shape = list(local.shape)
        shape[dim] = placement.size
        shard = cls.show(local, shape, placement.sequence.axis, dim)
        shard.placement = placement
        return shard

    @classmethod
    @untraced
    def wrap(cls, local: Tensor, *, dim: int, sequence: StepSequence) -> SequenceShard:
        """Shows what leaves a door as whole sequences.

        On the way back the gradient is multiplied by the number of ranks: see [Note: gradients inside and outside of doors].

        Args:
            local: Shape (B, s, ...), with its graph, plain or shown by the tensor axis; padding included.
            dim: The dimension of the tokens.
            sequence: The sequence they are of.

        Raises:
            ValueError: If it has not as many tokens as the rank holds.
        """
        dim %= local.ndim
        cut = sequence.cut
        if local.shape[dim] != cut.local:
            raise ValueError(
                f"Each of {cut.size} ranks holds {cut.local} of {cut.length} tokens, but dimension {dim} of a tensor of shape"
                f" {tuple(local.shape)} has {local.shape[dim]}."
            )
        placement = Placement.of(sequence, dim)
        if placement.held < cut.local:
            local = local.narrow(dim, 0, placement.held)
        return show(local, placement, cut.size)

    @staticmethod
    @untraced
    def enter(x: Tensor, dim: int, sequence: StepSequence) -> Tensor:
        """What this rank takes into a door of a tensor with a sequence: its tokens, padded with zeros.

        On the way back the gradient is divided by the number of ranks: see [Note: gradients inside and outside of doors].

        Args:
            x: Shape (B, S, ...), a `SequenceShard` or a whole tensor.
            dim: The dimension of the tokens.
            sequence: The sequence.
        """
        from lightning_5d.shown.made_whole import tell

        dim %= x.ndim
        cut, wanted = sequence.cut, Placement.of(sequence, dim)
        if isinstance(x, SequenceShard):
            same = x.axis is sequence.axis and x.cut_dim == dim and x.placement.matches(wanted)
            if same:
                local = held(x, cut.size)
                return padded(local, dim, cut.local) if placed_less(local, dim, cut.local) else local
            tell("a module with parameters", x)
            x = x.whole()
        if not (x.requires_grad and torch.is_grad_enabled()):
            return sequence.part(x, dim)
        local = taken(x, wanted, cut.size)
        return padded(local, dim, cut.local) if placed_less(local, dim, cut.local) else local

    @property
    @override
    def held(self) -> int:
        return self.local.shape[self.cut_dim]

    @property
    @override
    def held_part(self) -> Tensor:
        return self.local

    @override
    def gathered(self) -> Tensor:
        return self.placement.gather(self.local)

    @override
    def like(self, local: Tensor, dim: int | None = None) -> SequenceShard:
        return SequenceShard(local, self.placement if dim is None else self.placement.at(dim))

    @override
    def part(self, whole: Tensor, dim: int) -> Tensor:
        return self.placement.part(whole, dim)

    @override
    def matches(self, other: ShownTensor) -> bool:
        if not isinstance(other, SequenceShard) or self.ndim - self.cut_dim != other.ndim - other.cut_dim:
            return False
        return self.placement.matches(other.placement)

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        gradient = f", grad_fn=<{self.grad_fn.name()}>" if self.grad_fn is not None else ""
        return (
            f"SequenceShard(shape={tuple(self.shape)}, dtype={self.dtype}, {self.held} of {self.placement.size} along dimension"
            f" {self.cut_dim} here: {self.local}{gradient})"
        )

    @override
    def holding(self) -> str:
        return f"holds {self.held} of the {self.placement.size} tokens of these sequences"


def is_shown(x: Any) -> TypeGuard[SequenceShard]:
    """Whether it shows whole sequences of which this rank holds a part."""
    return isinstance(x, SequenceShard)


def placed_less(local: Tensor, dim: int, size: int) -> bool:
    """Whether padding is missing."""
    return local.shape[dim] < size


def show(local: Tensor, placement: Placement, factor: float = 1) -> SequenceShard:
    """This rank's part as the whole, with its graph; backward: of the whole gradient this rank's part, times `factor`."""
    if not (local.requires_grad and torch.is_grad_enabled()):
        return SequenceShard(local.detach(), placement)
    shown: SequenceShard = _Show.apply(local, placement, factor)  # type: ignore[no-untyped-call]
    return shown


def held(shard: SequenceShard, divisor: float = 1) -> Tensor:
    """What this rank holds, with the graph; backward: the gradient as the whole one, divided."""
    if not (shard.requires_grad and torch.is_grad_enabled()):
        return shard.local
    local: Tensor = _Hold.apply(shard, divisor)  # type: ignore[no-untyped-call]
    return local


def taken(whole: Tensor, placement: Placement, divisor: float = 1) -> Tensor:
    """What this rank takes of a whole tensor, with its graph; backward: the gradients of all ranks gathered, and divided."""
    if not (whole.requires_grad and torch.is_grad_enabled()):
        return placement.part(whole)
    local: Tensor = _Take.apply(whole, placement, divisor)  # type: ignore[no-untyped-call]
    return local


class _Show(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, local: Tensor, placement: Placement, factor: float) -> SequenceShard:
        ctx.placement, ctx.factor = placement, factor
        return SequenceShard(local.detach(), placement)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        placement: Placement = ctx.placement
        if isinstance(grad, SequenceShard):
            same = grad.cut_dim == placement.dim and grad.placement.matches(placement)
            local = held(grad, ctx.factor) if same else taken(grad.whole(), placement, ctx.factor)
        else:
            local = taken(grad, placement, ctx.factor)
        return local if ctx.factor == 1 else local * ctx.factor, None, None


class _Hold(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, shard: SequenceShard, divisor: float) -> Tensor:
        ctx.placement, ctx.divisor = shard.placement, divisor
        return shard.local.detach()

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[SequenceShard, None]:
        return show(grad if ctx.divisor == 1 else grad / ctx.divisor, ctx.placement, ctx.divisor), None


class _Take(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, whole: Tensor, placement: Placement, divisor: float) -> Tensor:
        ctx.placement, ctx.divisor = placement, divisor
        return placement.part(whole).detach()

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        whole = show(grad, ctx.placement, ctx.divisor).whole()
        return whole if ctx.divisor == 1 else whole / ctx.divisor, None, None


never_traced(SequenceShard)

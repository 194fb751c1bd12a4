"""A tensor that shows all columns of the logits and holds those of one rank."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from lightning_5d.shown.tensor import ShownTensor, never_traced, untraced
from lightning_5d.tensor_parallel.axis import TensorAxis
from lightning_5d.tensor_parallel.vocabulary.registry import VOCABULARY

# See [Note: one program, two kinds of tensors] in `shown/tensor.py`.


class VocabularyShard(ShownTensor):
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

    registry = VOCABULARY
    level = 0
    made_whole = "logits that {} ranks hold the columns of: they are made whole"
    never_whole = "Losses, softmax, logsumexp, argmax, topk, gather, sums and elementwise operations"

    vocabulary: int

    @staticmethod
    def __new__(cls, local: Tensor, axis: TensorAxis, vocabulary: int, dim: int) -> VocabularyShard:
        """See `wrap`; this one makes no graph."""
        shape = [vocabulary if d == dim else size for d, size in enumerate(local.shape)]
        shard = cls.show(local, shape, axis, dim)
        shard.vocabulary = vocabulary
        return shard

    @classmethod
    @untraced
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
    def vocabulary_dim(self) -> int:
        """Which dimension the vocabulary is."""
        return self.cut_dim

    @property
    def width(self) -> int:
        """Columns that each rank holds, padding included."""
        return self.local.shape[self.cut_dim]

    @property
    def start(self) -> int:
        """This rank's first column in the whole logits."""
        return self.axis.rank * self.width

    @property
    @override
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

    @property
    @override
    def held_part(self) -> Tensor:
        return self.columns

    @override
    def gathered(self) -> Tensor:
        return (
            self.axis.gather(self.local, self.vocabulary_dim)
            .narrow(self.vocabulary_dim, 0, self.vocabulary)
            .contiguous()
        )

    @override
    def like(self, local: Tensor, dim: int | None = None) -> VocabularyShard:
        return VocabularyShard(local, self.axis, self.vocabulary, self.vocabulary_dim if dim is None else dim)

    @override
    def part(self, whole: Tensor, dim: int) -> Tensor:
        return _part(whole, self.axis, self.vocabulary, dim, self.width)

    @override
    def matches(self, other: ShownTensor) -> bool:
        same = isinstance(other, VocabularyShard) and self.vocabulary == other.vocabulary
        return same and self.ndim - self.cut_dim == other.ndim - other.cut_dim

    @override
    def statistic(self, reduced: Tensor, dim: int) -> Tensor:
        # One number per column is no logits any more but a statistic, which may be kept (in the state of a metric) and sent.
        return self.like(reduced, 0).gathered() if reduced.ndim == 1 else self.like(reduced, dim)

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
    def holding(self) -> str:
        return f"holds {self.held} of the {self.vocabulary} columns of these logits"


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


def _part(whole: Tensor, axis: TensorAxis, vocabulary: int, dim: int, width: int) -> Tensor:
    start = min(axis.rank * width, vocabulary)
    held = min(width, vocabulary - start)
    part = whole.narrow(dim, start, held)
    if held == width:
        return part
    shape = [width - held if d == dim else size for d, size in enumerate(part.shape)]
    return torch.cat([part, part.new_zeros(shape)], dim)


never_traced(VocabularyShard)

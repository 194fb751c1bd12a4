"""A dimension of which each rank of the tensor axis holds one piece: cutting, joining, and sums of which each keeps its piece."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_5d.tensor_parallel.axis import Arriving, TensorAxis


@dataclass(frozen=True)
class Pieces:
    """How a dimension is spread over the ranks.

    All pieces have one length. Where the ranks do not divide the dimension, zeros follow its end, which are never seen where
    the dimension is whole.

    Attributes:
        axis: The ranks.
        dim: The dimension.
        whole: Its length.
    """

    axis: TensorAxis
    dim: int
    whole: int

    @property
    def length(self) -> int:
        """The length of one piece."""
        return -(-self.whole // self.axis.size)

    @property
    def padding(self) -> int:
        """How many zeros follow."""
        return self.length * self.axis.size - self.whole

    def take(self, whole: Tensor) -> Tensor:
        """This rank's piece of what all ranks hold."""
        start = min(self.axis.rank * self.length, self.whole)
        end = min(start + self.length, self.whole)
        piece = whole.narrow(self.dim, start, end - start)
        if end - start == self.length:
            return piece.clone() if piece.is_contiguous() else piece.contiguous()
        padded = whole.new_zeros(self._shape(whole, self.length))
        padded.narrow(self.dim, 0, end - start).copy_(piece)
        return padded

    def join(self, piece: Tensor) -> Tensor:
        """The whole, of the pieces of all ranks."""
        joined = self.axis.gather(piece, self.dim)
        return joined.narrow(self.dim, 0, self.whole).contiguous() if self.padding else joined

    def start_scatter_sum(self, whole: Tensor) -> Arriving:
        """Starts the sum over the ranks of what each holds whole, of which this one keeps its piece."""
        if self.padding:
            padded = self.axis.empty(self._shape(whole, self.length * self.axis.size), whole)
            padded.narrow(self.dim, 0, self.whole).copy_(whole)
            padded.narrow(self.dim, self.whole, self.padding).zero_()
            whole = padded
        return self.axis.start_scatter_sum(whole, self.dim)

    def _shape(self, like: Tensor, length: int) -> list[int]:
        shape = list(like.shape)
        shape[self.dim] = length
        return shape

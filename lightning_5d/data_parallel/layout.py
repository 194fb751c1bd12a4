"""How the tensors of a group lie in flat buffers: shards of several dtypes, and gradients cut among the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

# Tensors of any dtype start at a multiple of this, so that the bytes can be viewed as their dtype.
_ALIGNMENT = 16


class Layout:
    """The places of flat tensors with these numbers of elements and dtypes.

    Attributes:
        nbytes: What all of them take, padding included.
        payload: What they take without it.
    """

    def __init__(self, numels: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
        self._sizes = [numel * dtype.itemsize for numel, dtype in zip(numels, dtypes, strict=True)]
        padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in self._sizes]
        if padded and not any(padded):
            padded[-1] = _ALIGNMENT  # parameters without elements alone: an empty buffer has no address to be known by
        self._dtypes = list(dtypes)
        self._starts = [0, *accumulate(padded)]
        self.nbytes, self.payload = sum(padded), sum(self._sizes)
        self._one_dtype = self._dtypes[0] if len(set(self._dtypes)) == 1 else None
        self._split: list[int] = []
        if self._one_dtype is not None:  # the usual case, cut by one call: pieces and the gaps after them
            itemsize = self._one_dtype.itemsize
            for size, whole in zip(self._sizes, padded, strict=True):
                self._split += [size // itemsize, (whole - size) // itemsize]

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in a ``buffer`` of ``nbytes`` bytes."""
        if self._one_dtype is not None:
            return list(buffer.view(self._one_dtype).split_with_sizes(self._split)[::2])
        return [
            buffer[start : start + size].view(dtype)
            for start, size, dtype in zip(self._starts, self._sizes, self._dtypes, strict=False)
        ]


def cut_among_ranks(
    grads: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], dims: Sequence[int] | None = None
) -> None:
    """Fills each rank's target with its rows of every gradient, one gradient after the other, padded with zeros.

    Args:
        grads: The gradients, whole.
        targets: One flat tensor for each rank.
        dims: The dimension along which each gradient is cut, which ranks divide if it is not the first; the first by default.
    """
    ranks = len(targets)
    pieces: list[list[torch.Tensor]] = [[] for _ in targets]
    for grad, dim in zip(grads, dims or [0] * len(grads), strict=True):
        if dim:
            for piece, part in zip(pieces, grad.chunk(ranks, dim), strict=True):
                piece.append(part.reshape(-1))
            continue
        rows = -(-grad.shape[0] // ranks)
        if grad.shape[0] == rows * ranks:
            for piece, part in zip(pieces, grad.reshape(ranks, -1).unbind(), strict=True):
                piece.append(part)
            continue
        for rank, piece in enumerate(pieces):
            part = grad[rank * rows : (rank + 1) * rows]
            missing = (rows - part.shape[0]) * (grad.numel() // grad.shape[0])
            piece += [part.reshape(-1), part.new_zeros(missing)]
    for piece, target in zip(pieces, targets, strict=True):
        torch.cat(piece, out=target)

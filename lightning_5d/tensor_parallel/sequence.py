"""How long the sequence is where ranks hold pieces of it.

A piece does not tell the length of the whole: of 7 and of 8 tokens two ranks hold 4 each. So the tensor that is handed from
block to block carries it (`lightning_5d.whole_length`), which a block that backward runs again finds on its saved input, and a later
pipeline stage on what it gets. Where it is lost, the length of the present forward counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_5d.tensor_parallel.axis import TensorAxis
from lightning_5d.tensor_parallel.pieces import Pieces
from lightning_5d.tensor_parallel.regions import join, take
from lightning_5d.whole_length import length_on, mark

DIM = 1


class SequenceCut:
    """Cuts activations along the sequence, and knows how long what was cut is.

    Args:
        axis: The ranks.
        received: Gives what the present pipeline stage got from the one before, ``None`` on the first stage: pieces whose whole this
            rank has not seen. ``None`` where this rank holds all blocks.
    """

    def __init__(self, axis: TensorAxis, received: Callable[[], Any] | None = None) -> None:
        self._axis, self._received = axis, received
        self._open: int | None = None
        self._inside: int | None = None
        self._seen: dict[int, set[int]] = {}

    @property
    def inside(self) -> int | None:
        """The length of the whole, while a block runs on a piece of it."""
        return self._inside

    def cut(self, x: Tensor) -> Tensor:
        """This rank's piece of a whole activation (B, T, D).

        Raises:
            ValueError: If it has no sequence.
        """
        if x.ndim < 3:
            raise ValueError(
                f"Sequence parallelism cuts activations of shape (batch, tokens, features), and a block got one of {tuple(x.shape)}."
                " Train without it: TensorParallel(..., sequence_parallel=False)."
            )
        length = x.shape[DIM]
        pieces = Pieces(self._axis, DIM, length)
        if not in_backward():
            self._open = length
        self._seen.setdefault(pieces.length, set()).add(length)
        return mark(take(x, pieces), length)

    def cut_if_whole(self, x: Tensor) -> Tensor:
        """The same for the input of a later block, if it has come from outside of the blocks."""
        if self._received is not None or in_backward() or x.ndim < 3 or length_on(x) is not None:
            return x
        if self._open is not None and x.shape[DIM] == -(-self._open // self._axis.size):
            return x
        return self.cut(x)

    def whole(self, piece: Tensor) -> Tensor:
        """The whole of the pieces, behind the last block."""
        joined = join(piece, self.pieces(piece))
        if not in_backward():
            self._open = None
        return joined

    def pieces(self, piece: Tensor) -> Pieces:
        """How that of which a tensor is a piece is cut.

        Raises:
            ValueError: If nobody can tell how long it is.
        """
        length = piece.shape[DIM]
        whole = length_on(piece)
        if whole is None:
            whole = self._inside if self._inside is not None else self._guess(length)
        elif self._received is not None:
            self._seen.setdefault(length, set()).add(whole)
        pieces = Pieces(self._axis, DIM, whole)
        if pieces.length != length:
            raise ValueError(
                f"A piece of {length} tokens came where pieces of {pieces.length} ({whole} in all, {self._axis.size} ranks) were"
                " expected: inside of the blocks every activation has this rank's piece of the sequence. Train without sequence"
                " parallelism if blocks exchange anything else."
            )
        return pieces

    def pieces_of_whole(self, x: Tensor) -> Pieces:
        """How a whole activation inside of a region is cut.

        Raises:
            ValueError: If its dimension 1 is not the sequence.
        """
        if x.ndim < 3 or (self._inside is not None and x.shape[DIM] != self._inside):
            raise ValueError(
                f"What leaves a region has to have the shape (batch, tokens, features) where the sequence is cut"
                f"{'' if self._inside is None else f', with {self._inside} tokens'}, and {tuple(x.shape)} came. Train without"
                " sequence parallelism."
            )
        return Pieces(self._axis, DIM, x.shape[DIM])

    def take(self, whole: Tensor) -> Tensor:
        """This rank's piece of a whole activation inside of the blocks."""
        return mark(take(whole, self.pieces_of_whole(whole)), whole.shape[DIM])

    def begin(self, x: Tensor) -> tuple[int | None, int]:
        """A block begins to run on a piece; returns what `end` has to be given, and the length of the whole."""
        before, self._inside = self._inside, None
        try:
            length = self.pieces(x).whole
        except BaseException:
            self._inside = before
            raise
        self._inside = length
        return before, length

    def end(self, before: int | None) -> None:
        """The block has run."""
        self._inside = before

    def _guess(self, length: int) -> int:
        if not in_backward():
            received = None if self._received is None else self._received()
            if received is not None:
                return self._length_on_received(received)
            if self._open is not None:
                return self._open
        seen = self._seen.get(length, {length * self._axis.size})
        if len(seen) > 1:
            raise ValueError(
                f"Nobody can tell whether a piece of {length} tokens that backward computes again is one of"
                f" {' or '.join(map(str, sorted(seen)))}: what hands activations on between the blocks makes new tensors of them. Pad"
                f" batches to a multiple of {self._axis.size} tokens, or use FiveD(activation_checkpointing=...) on whole blocks."
            )
        return next(iter(seen))

    def _length_on_received(self, received: Any) -> int:
        for leaf in tree_leaves(received):
            if isinstance(leaf, Tensor) and (length := length_on(leaf)) is not None:
                self._seen.setdefault(-(-length // self._axis.size), set()).add(length)
                return length
        raise ValueError(
            "The pipeline stage before has handed on a piece of the sequence without its length: a hook on the last block of that"
            " stage makes another tensor of what the block returns. Take the hook off, or train without sequence parallelism."
        )


def marked(output: Any, like: Tensor, length: int) -> Any:
    """Notes it on what a block returns: a tensor, or several of which the first is handed on."""
    first = output[0] if isinstance(output, tuple | list) and output else output
    if isinstance(first, Tensor) and first.ndim >= 3 and first.shape[DIM] == like.shape[DIM]:
        mark(first, length)
    return output


def in_backward() -> bool:
    """Whether this is code that backward runs again."""
    return torch._C._current_graph_task_id() != -1  # private; checked with torch 2.13

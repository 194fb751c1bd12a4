"""What a tensor says about itself where it is one of several ranks' pieces: how long the whole is.

A piece does not tell: of 7 and of 8 tokens two ranks hold 4 each. So it carries the number, as an attribute, from module to module
and from stage to stage.
"""

from __future__ import annotations

from torch import Tensor

_LENGTH = "_fived_length"


def mark(piece: Tensor, length: int) -> Tensor:
    """Notes on a piece how long the whole is."""
    piece.__dict__[_LENGTH] = length
    return piece


def length_on(piece: Tensor) -> int | None:
    """What was noted; ``None`` for what is whole, or new."""
    length: int | None = piece.__dict__.get(_LENGTH)
    return length


def marked_like(new: Tensor, old: Tensor) -> Tensor:
    """The new tensor, with what was noted on the one that it was made of."""
    length = length_on(old)
    return new if length is None or new is old else mark(new, length)

"""Random numbers inside a door: a rank's own for its tokens, and the same on all ranks of the axis for everything else.

Numbers for tokens come from a stream whose seed is one number of the shared one with the rank's place on the axis. So the shared
stream moves on alike on all ranks, whatever each draws, and decisions for a whole layer or a whole sample stay the same on all. What
recomputes a block restores the shared stream first, as for a block in one process, and so draws the same masks again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_5d.context_parallel.inside import Inside
from lightning_5d.context_parallel.step_sequence import StepSequence
from lightning_5d.tensor_parallel.random_regions import Seeded, generators, own_seed

DROPOUT = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    F.rrelu,
    torch.dropout,
    torch.dropout_,
    torch.feature_dropout,
    torch.feature_dropout_,
    torch.alpha_dropout,
    torch.alpha_dropout_,
    torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
    torch.native_dropout,
    torch.rrelu,
    torch.rrelu_,
)
"""The functions of dropout, and what is like it."""

_NOISE = (
    F.gumbel_softmax,
    torch.bernoulli,
    torch.multinomial,
    torch.normal,
    torch.poisson,
    torch.rand_like,
    torch.randn_like,
    torch.randint_like,
    *(
        getattr(Tensor, name)
        for name in ("bernoulli", "bernoulli_", "uniform_", "normal_", "exponential_", "random_", "log_normal_", "cauchy_", "geometric_", "multinomial")
    ),
)  # fmt: skip
_FACTORIES = (torch.rand, torch.randn)

DRAWS = (*DROPOUT, *_NOISE, *_FACTORIES)
"""The functions that draw random numbers."""


class RandomParts:
    """Draws a rank's random numbers inside doors.

    Args:
        tensor_size: Ranks of the tensor axis between which a rank's tokens may be cut again; they have streams of their own.
    """

    def __init__(self, tensor_size: int = 1) -> None:
        self._tensor_size = tensor_size

    def draw(self, inside: Inside, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one of `DRAWS`.

        Args:
            inside: The open door.
            func: The function.
            args: Its arguments.
            kwargs: Its arguments by name.
        """
        if func in DROPOUT and not is_active(args, kwargs):
            return func(*args, **kwargs)
        subject = None if func in _FACTORIES else args[0] if args else kwargs.get("input", kwargs.get("self"))
        if subject is None:
            shape, device = _size(args, kwargs), torch.device(kwargs.get("device") or torch.get_default_device())
        elif isinstance(subject, Tensor):
            shape, device = tuple(subject.shape), subject.device
            if subject.is_leaf and subject.requires_grad:  # a weight
                return func(*args, **kwargs)
        else:
            return func(*args, **kwargs)
        sequence = inside.sequence
        if not is_of_tokens(shape, self._lengths(sequence), inside.rows):
            return func(*args, **kwargs)
        given = kwargs.get("generator")
        used = tuple(generators(device)) if given is None else (given,)
        number = int(torch.empty((), dtype=torch.int64, device=used[0].device).random_(generator=used[0]).item())
        # Of the two streams of a device and of the CPU, only the one that is drawn from has to be set.
        with Seeded(used[-1:], own_seed(number, sequence.rank)):
            return func(*args, **kwargs)

    def _lengths(self, sequence: StepSequence) -> frozenset[int]:
        """How many tokens there are along a dimension of tokens, inside and outside of what the tensor axis cuts again."""
        local, size = sequence.cut.local, self._tensor_size
        return frozenset([local, local // size, -(-local // size)]) - {0}


def is_of_tokens(shape: tuple[int, ...], lengths: Iterable[int], rows: int) -> bool:
    """Whether a tensor of this shape has numbers for single tokens, and not for whole samples or weights.

    Args:
        shape: Its shape.
        lengths: How many tokens there are, in one or several ways in which they are cut.
        rows: How many sequences there are.
    """
    if not shape or (len(shape) > 1 and all(size == 1 for size in shape[1:])):  # one number for a whole sample
        return False
    if any(length in shape for length in lengths):
        return True
    # Rows of another number than there are sequences are tokens of all of them, or those that were picked for something. Of these each
    # rank has as many as it has, and the shared stream has to go on alike.
    return len(shape) == 2 and shape[0] != rows


def is_active(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of dropout drops anything."""
    rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(rate) and bool(training)


def _size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    size = kwargs.get("size", args)
    if size and isinstance(size[0], tuple | list):
        size = size[0]
    return tuple(int(x) for x in size)

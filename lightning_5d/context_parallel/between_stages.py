"""Sequences of which each rank holds a part, on their way from one stage of a pipeline to the next."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from lightning_5d.context_parallel.shown import SequenceShard, is_shown
from lightning_5d.context_parallel.stated_mask import StatedMask
from lightning_5d.context_parallel.step_sequence import StepSequence


def plain_form(tensor: Tensor) -> tuple[Tensor, Hashable] | None:
    """See `lightning_5d.parallelism.Parallelized.plain_form`: a rank hands its own tokens to the same rank of the next stage.

    What is no whole sequence any more, as a window of one, or has its tokens merged with rows, travels whole.

    Raises:
        TypeError: For a mask that is stated in words.
    """
    if isinstance(tensor, StatedMask):
        raise TypeError(
            "A block returns its attention mask, so that it would be sent to the next stage, and with ContextParallel a mask has no values"
            " to send. Let blocks take the mask from the model that calls them, and return hidden states."
        )
    if not is_shown(tensor):
        return None
    sequence, dim = tensor.placement.sequence, tensor.cut_dim
    if tensor.placement.merged or not tensor.placement.matches(tensor.placement.of(sequence, dim)):
        return tensor.whole(), None
    return SequenceShard.enter(tensor, dim, sequence), (dim, sequence.cut.length)


def from_plain_form(plain: Tensor, form: Any, sequence: Callable[[int], StepSequence]) -> Tensor:
    """The reverse; `sequence` gives the one of so many tokens."""
    if form is None:
        return plain
    dim, length = form
    return SequenceShard.wrap(plain, dim=dim, sequence=sequence(length))

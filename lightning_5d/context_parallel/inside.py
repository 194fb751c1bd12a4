"""What is known while a door is open: inside, each rank computes on its tokens of the step's sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lightning_5d.context_parallel.step_sequence import StepSequence


@dataclass(eq=False)
class Inside:
    """One call of a door, from the cut of its arguments until its outputs are shown.

    A forward that runs again in backward gets the object of its first run. All attributes are the same on all ranks of the axis, up to
    what `sequence` says about this one.

    Attributes:
        name: The door's, for people.
        sequence: The sequences, and how they are cut.
        documents: (B, S) or (1, S), int64, whole: which document each token belongs to, where the user's own ``position_ids`` say so and
            no mask was given with them. ``None`` if all tokens of a row are one document.
        labels: Tensors that came in whole although they have the sequence's length.
    """

    name: str
    sequence: StepSequence
    documents: Tensor | None = None
    labels: tuple[Tensor, ...] = ()
    _gathered: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def gather(self, local: Tensor, dim: int) -> Tensor:
        """`StepSequence.gather`, once per tensor: all layers of a model share a mask. All ranks call it together."""
        key = (id(local), local._version, dim)
        if key not in self._gathered:
            # The local tensor is kept with it, so that no other one gets its id.
            self._gathered[key] = (local, self.sequence.gather(local, dim))
        return self._gathered[key][1]

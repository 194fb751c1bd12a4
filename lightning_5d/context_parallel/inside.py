"""What is known while a door is open: inside, each rank computes on its tokens of the step's sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_5d.context_parallel.step_sequence import StepSequence

if TYPE_CHECKING:
    from lightning_5d.context_parallel.documents import Limits


@dataclass(eq=False)
class Inside:
    """One call of a door, from the cut of its arguments until its outputs are shown.

    A forward that runs again in backward gets the object of its first run. All attributes are the same on all ranks of the axis, up to
    what `sequence` says about this one.

    Attributes:
        name: The door's, for people.
        sequence: The sequences, and how they are cut.
        documents: (B, S) or (1, S), int64, whole: which document each token belongs to, where a causal model of Hugging Face would read it
            off the user's own ``position_ids``. ``None`` if all tokens of a row are one document. Bidirectional models do not ask.
        rows: Sequences in the tensors that were cut, B.
        cacheless: Whether a model of Hugging Face that would keep a cache by itself was told not to. In one process it would then not look
            for documents.
        limits: Documents to which all attention of the sequences keeps, by an entry of the batch.
        paused: Whether code of the user's level is running (a loss that sees whole sequences): nothing is then redirected.
    """

    name: str
    sequence: StepSequence
    documents: Tensor | None = None
    rows: int = 1
    cacheless: bool = False
    limits: Limits | None = None
    paused: bool = False
    _gathered: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @contextmanager
    def at_user_level(self) -> Iterator[None]:
        """A context for code that sees whole sequences while the door is open."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def gather(self, local: Tensor, dim: int) -> Tensor:
        """`StepSequence.gather`, once per tensor: all layers of a model share a mask. All ranks call it together."""
        version = None if local.is_inference() else local._version
        key = (local.data_ptr(), local.dtype, local.shape, local.stride(), version, dim)
        if key not in self._gathered:
            # The local tensor is kept with it, so that no other one gets its memory.
            self._gathered[key] = (local, self.sequence.gather(local, dim))
        return self._gathered[key][1]

"""What is known while a door is open: inside, each rank computes on its tokens of the step's sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
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
        documents: (B, S) or (1, S), int64, whole: which document each token belongs to, where a causal model of Hugging Face would read it
            off the user's own ``position_ids``. ``None`` if all tokens of a row are one document. Bidirectional models do not ask.
        rows: Rows of the tensors that were cut.
        paused: Whether code of the user's level is running (a loss that sees whole sequences): nothing is then redirected.
    """

    name: str
    sequence: StepSequence
    documents: Tensor | None = None
    rows: int = 1
    paused: bool = False
    _all_seen: Tensor | None = field(default=None, repr=False)
    _gathered: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @contextmanager
    def at_user_level(self) -> Iterator[None]:
        """A context for code that sees whole sequences while the door is open."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def all_seen(self, device: torch.device) -> Tensor:
        """(B, s), bool: a mask that hides no token, given to models of Hugging Face that got none.

        They would else read positions that do not grow by one, as in zigzag order, as packed documents.
        """
        if self._all_seen is None or self._all_seen.device != device:
            self._all_seen = torch.ones(self.rows, self.sequence.cut.local, dtype=torch.bool, device=device)
        return self._all_seen

    def hides_nothing(self, mask: Tensor) -> bool:
        """Whether a mask is the one of `all_seen`, or a view of it: there is then no padding, and nothing to gather."""
        own = self._all_seen
        return own is not None and mask.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()

    def gather(self, local: Tensor, dim: int) -> Tensor:
        """`StepSequence.gather`, once per tensor: all layers of a model share a mask. All ranks call it together."""
        key = (id(local), local._version, dim)
        if key not in self._gathered:
            # The local tensor is kept with it, so that no other one gets its id.
            self._gathered[key] = (local, self.sequence.gather(local, dim))
        return self._gathered[key][1]

"""What a query may see, in terms of positions in the whole sequence."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """What each query may see of a sequence of which every rank holds a part. All conditions must hold.

    The tensors are small and whole on every rank: numbers per token, not per pair of them.

    Attributes:
        causal: Keys up to the query's own position only.
        window: Keys at a distance of less than this only (of both sides, if not causal).
        keys: (B, S) or (1, S), bool: keys that may be seen at all; ``None`` for all.
        documents: (B, S) or (1, S), integers: only keys of the query's own document.
    """

    causal: bool = False
    window: int | None = None
    keys: Tensor | None = None
    documents: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether it says nothing about single tokens."""
        return self.window is None and self.keys is None and self.documents is None

"""Sequences of which each rank holds some tokens, and what people do with them outside of the layers.

What comes out of a door looks like whole sequences and is a `SequenceShard`. Losses, metrics and logs are written for whole
sequences and work on it unchanged; those that reduce over tokens add up one small tensor over the ranks.
"""

from lightning_5d.context_parallel.shown import calls, products, rows, shapes, sums  # noqa: F401 - they register what they handle
from lightning_5d.context_parallel.shown.cross_entropy import local_cross_entropy
from lightning_5d.context_parallel.shown.outputs import with_whole_sequences
from lightning_5d.context_parallel.shown.shard import SequenceShard, is_shown

__all__ = ["SequenceShard", "is_shown", "local_cross_entropy", "with_whole_sequences"]

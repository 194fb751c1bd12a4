"""Logits that each rank holds some columns of, and what people do with logits.

What the head of a model returns looks like the whole logits and is a `VocabularyShard`. Losses, metrics and sampling are
written for whole logits and work on it unchanged; those that reduce over the vocabulary exchange one number per token.
"""

from lightning_5d.tensor_parallel.vocabulary import (  # noqa: F401 - what they handle is known once they are imported
    calls,
    choices,
    normalization,
    shapes,
)
from lightning_5d.tensor_parallel.vocabulary.cross_entropy import cross_entropy
from lightning_5d.tensor_parallel.vocabulary.outputs import with_whole_logits
from lightning_5d.tensor_parallel.vocabulary.shard import VocabularyShard

__all__ = ["VocabularyShard", "cross_entropy", "with_whole_logits"]

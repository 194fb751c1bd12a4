"""What steps return, with whole logits in place of those that each rank holds some columns of."""

from __future__ import annotations

from typing import Any

from lightning_5d.shown.outputs import with_wholes
from lightning_5d.tensor_parallel.vocabulary.shard import VocabularyShard


def with_whole_logits(output: Any, *, training: bool = False) -> Any:
    """What hooks, callbacks and `trainer.predict` are given of what a step has returned; all ranks of the axis call it.

    Logits become plain tensors of all columns, the same on every rank, wherever they are in lists, tuples, mappings (a Hugging Face
    `ModelOutput`, too) and dataclasses. What has none is returned as it is.

    Args:
        output: What the step returned.
        training: It was a `training_step`. Its ``loss`` stays as it is, and logits beside it lose their graph, as Lightning would
            detach them, too.
    """
    return with_wholes(output, VocabularyShard, training=training)

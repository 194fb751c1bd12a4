"""What steps return, with whole sequences in place of those that each rank holds some tokens of."""

from __future__ import annotations

from typing import Any

from lightning_5d.context_parallel.shown.shard import SequenceShard
from lightning_5d.shown.outputs import with_wholes


def with_whole_sequences(output: Any, *, training: bool = False) -> Any:
    """What hooks, callbacks and `trainer.predict` are given of what a step has returned; all ranks of the axis call it.

    Sequences become plain tensors in their original order and without padding, the same on every rank, wherever they are in lists, tuples,
    mappings (a Hugging Face `ModelOutput`, too) and dataclasses; logits of which ranks hold columns, too, become whole. What has none is
    returned as it is.

    Args:
        output: What the step returned.
        training: It was a `training_step`. Its ``loss`` stays as it is, and what is beside it loses its graph, as Lightning would
            detach it, too.
    """
    return with_wholes(output, SequenceShard, training=training)

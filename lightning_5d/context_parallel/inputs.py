"""What queries, keys and values have to look like, whatever the method."""

from __future__ import annotations

from torch import Tensor

from lightning_5d.context_parallel.cut import SequenceCut


def check_inputs(q: Tensor, k: Tensor, v: Tensor, cut: SequenceCut, ranks: int) -> None:
    """Refuses what `ContextAttention` is not made for.

    Args:
        q: (B, H, s, D).
        k: (B, K, s, D).
        v: (B, K, s, E).
        cut: Which tokens each rank holds.
        ranks: How many there are.

    Raises:
        ValueError: If the shapes fit neither each other nor the cut.
    """
    if cut.size != ranks:
        raise ValueError(f"The sequence is cut for {cut.size} ranks; attention is over {ranks}.")
    if {x.shape[-2] for x in (q, k, v)} != {cut.local}:
        raise ValueError(
            f"Queries, keys and values have {q.shape[-2]}, {k.shape[-2]} and {v.shape[-2]} tokens; each rank holds {cut.local} of a"
            f" sequence of {cut.length}. Attention between sequences of different lengths, as in an encoder-decoder model, is not cut."
        )
    if q.shape[1] % k.shape[1] or k.shape[:-1] != v.shape[:-1] or k.shape[-1] != q.shape[-1] or len(q) != len(k):
        raise ValueError(
            f"Queries of shape {tuple(q.shape)} do not fit keys {tuple(k.shape)} and values {tuple(v.shape)}: (B, H, s, D), and"
            " (B, K, s, D) where K divides H."
        )


def of_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What attention gives where there are no sequences, with a graph."""
    return (q.sum(-1, keepdim=True) + k.sum() + v.sum()).expand(*q.shape[:-1], v.shape[-1])

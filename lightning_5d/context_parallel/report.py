"""What a context axis does with sequences of some length, as numbers and as a few lines for people. Nothing here needs ranks."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_5d.context_parallel.attention import Method
from lightning_5d.context_parallel.cut import SequenceCut

_LISTED = 8
"""So many ranks are listed one by one; of more, the first, the second and the last."""


@dataclass(frozen=True)
class AttentionShape:
    """What messages of an attention layer are made of.

    Attributes:
        heads: Of queries, H.
        kv_heads: Of keys and values, K.
        head_size: Features of a head, D.
        itemsize: Bytes of an element.
    """

    heads: int
    kv_heads: int
    head_size: int
    itemsize: int = 4


def causal_work(cut: SequenceCut) -> list[float]:
    """Pairs of a query and a key that each rank computes under causal attention, padding included, over the mean of all ranks."""
    pairs = [
        sum((start + 1 + stop) * (stop - start) / 2 for start, stop in cut.place_spans(place))
        for place in range(cut.places)
    ]
    mean = sum(pairs) / len(pairs)
    return [pairs[rank // cut.ulysses] / mean for rank in range(cut.size)]


def sent_by_layer(method: Method, cut: SequenceCut, shape: AttentionShape, *, causal: bool = True) -> tuple[int, int]:
    """Bytes that a rank sends in one attention layer for one sequence, mean over the ranks, in forward and in backward.

    Of the keys and values of the n places of a ring, causal attention needs 3/4 in zigzag order and 1/2 in contiguous order. In
    backward gradients of as many travel, and keys and values once more between hosts (ranks of one host read them in place).

    Args:
        method: How attention sees other ranks' tokens.
        cut: Which tokens each rank holds.
        shape: Of the layer.
        causal: Whether queries see no later keys.
    """
    row = shape.head_size * shape.itemsize
    block = 2 * cut.local * shape.kv_heads * row
    if method == "all_gather":
        gathered = (cut.size - 1) * block
        return gathered, 2 * gathered
    neighbours = cut.size if method == "ulysses" else cut.ulysses
    # Where they are fewer than the ranks that share them, key and value heads go to several.
    repeated = max(shape.kv_heads, neighbours)
    exchanged = (neighbours - 1) * cut.local * (2 * shape.heads + 2 * repeated) * row // neighbours
    if method == "ulysses":
        return exchanged, exchanged
    block = block * repeated // shape.kv_heads if neighbours > 1 else block
    needed = 1.0 if not causal else 0.75 if cut.balance == "zigzag" else 0.5
    hops = round((cut.places - 1) * needed * block)
    return exchanged + hops, exchanged + 2 * hops


def describe_context(
    method: Method, cut: SequenceCut, shape: AttentionShape | None = None, *, causal: bool = True
) -> str:
    """A few lines: who holds which positions, how even the work is, and what is sent.

    Args:
        method: How attention sees other ranks' tokens.
        cut: Which tokens each rank holds.
        shape: Of an attention layer, for what is sent.
        causal: Whether queries see no later keys.
    """
    how = f"{method}, {cut.balance}" if method != "ulysses" else method
    if method == "ring" and cut.ulysses > 1:
        how += f", {cut.ulysses} neighbours that share heads in each of {cut.places} places"
    padding = f", padded to {cut.padded}," if cut.padded != cut.length else ""
    lines = [f"Context axis of {cut.size} ({how}): of {cut.length} tokens{padding} each rank holds {cut.local}."]
    work = causal_work(cut) if method != "ulysses" else [1.0] * cut.size
    rows = [
        (f"rank {rank}", ", ".join(f"{start}-{stop - 1}" for start, stop in cut.spans(rank)), f"{work[rank]:.2f}")
        for rank in (range(cut.size) if cut.size <= _LISTED else (0, 1, cut.size - 1))
    ]
    rows = [("", "positions", "work" if causal else ""), *rows]
    if not causal:
        rows = [(*row[:2], "") for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    table = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if cut.size > _LISTED:
        table.insert(3, "...")
    lines += table
    if causal:
        lines.append("Work is that of causal attention, 1 being an equal share.")
    if shape is not None:
        forward, backward = sent_by_layer(method, cut, shape, causal=causal)
        sent = f"{_mib(forward)} in forward and {_mib(backward)} in backward"
        lines.append(f"A rank sends per attention layer and sequence {sent}, in the mean.")
    return "\n".join(lines)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"

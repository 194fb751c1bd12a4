"""How the weight of one layer is spread over ranks: functions from widths, styles and heads to rows."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_5d.tensor_parallel.heads import Heads, Role
from lightning_5d.tensor_parallel.rows import Rows, even
from lightning_5d.tensor_parallel.styles import Style


def packed(dim: int, parts: Sequence[int], size: int) -> Rows:
    """Rows made of parts one after the other, each of which is cut: a rank's rows are its share of every part."""
    starts = [sum(parts[:i]) for i in range(len(parts))]
    index = [
        start + rank * (part // size) + row
        for rank in range(size)
        for start, part in zip(starts, parts, strict=True)
        for row in range(part // size)
    ]
    return Rows(dim, sum(parts), tuple(index))


def padded(vocabulary: int, size: int) -> Rows:
    """Rows of a vocabulary, with as many of padding behind them as it takes to give all ranks the same number."""
    missing = -vocabulary % size
    return even(0, vocabulary) if not missing else Rows(0, vocabulary, (*range(vocabulary), *[-1] * missing))


def features(dim: int, width: int, parts: int, size: int) -> Rows:
    """Rows of features that are parts of one size; each part is cut."""
    return even(dim, width) if parts == 1 else packed(dim, [width // parts] * parts, size)


def key_values(width: int, parts: int, heads: Heads, size: int) -> Rows:
    """Rows of keys, or values, or `parts` of such after each other. Ranks that share a head all have it."""
    copies = heads.copies(size)
    if copies == 1:
        return features(0, width, parts, size)
    part = width // parts
    head = part // heads.kv
    index = [
        number * part + row
        for rank in range(size)
        for number in range(parts)
        for kv in heads.kv_of(rank, size)
        for row in range(kv * head, (kv + 1) * head)
    ]
    return Rows(0, width, tuple(index), copies)


def head_rows(width: int, style: Style, role: Role | None, heads: Heads, size: int) -> tuple[Rows, str] | None:
    """Rows of one of an attention's projections, and what a rank gets; ``None`` if its width is not made of those heads.

    The size fits the heads. Fused projections without a style that says where their parts lie hold everything of a head
    together, as GPT-NeoX's do: there, heads in their order are right.
    """
    query, kv = heads.local(size)
    if style.fused:
        count = heads.query + 2 * heads.kv
        if width % count:
            return None
        parts = [n * (width // count) for n in (heads.query, heads.kv, heads.kv)]
        return packed(0, parts, size), f"{query} + {kv} + {kv} of its {heads}"
    if role in ("k", "v") or (role == "kv" and style.packed > 1):
        if width % (heads.kv * style.packed):
            return None
        copies = heads.copies(size)
        shared = f", each on {copies} ranks" if copies > 1 else ""
        return key_values(width, style.packed, heads, size), f"{kv} of {heads.kv} key/value heads{shared}"
    count, part = (heads.kv, kv) if role == "qkv" else (heads.query, query)
    if width % (count * style.packed):
        return None
    return features(0, width, style.packed, size), f"{part} of {count} heads"

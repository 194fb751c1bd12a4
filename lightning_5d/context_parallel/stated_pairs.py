"""What a mask that a model wrote down of pairs of its tokens says of all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_5d.context_parallel.inside import Inside
from lightning_5d.context_parallel.masks import AttentionMask
from lightning_5d.context_parallel.pairs import Condition, PairMask, Purpose
from lightning_5d.context_parallel.place import refused

_IN_ORDER = (
    "Pass position_ids into the model, which are then those of the whole sequence, or is_causal=True with ContextParallel(documents=…),"
    " and let positions grow within each document."
)


def stated(inside: Inside, mask: PairMask, queries: torch.Size, purpose: Purpose) -> AttentionMask | None:
    """What it says of all tokens; ``None`` if it is no mask of this purpose. All ranks of the axis call it together.

    Args:
        inside: The door that is open.
        mask: Made inside of it.
        queries: The shape of queries without tokens and features: (B, H), (B,), or more before H.
        purpose: What attention takes it for.

    Raises:
        MisconfigurationException: If it differs between heads, or compares positions that are not those of the sequence.
    """
    fitting = next((each for each in (mask, mask.turned()) if each.fits(purpose)), None)
    if fitting is None:
        return None
    if (queries, purpose) in mask.answers:
        return mask.answers[queries, purpose]
    documents: Tensor | None = None
    keys: Tensor | None = None
    distances: list[tuple[Tensor, Condition]] = []
    causal = False
    for condition in fitting.conditions:
        if condition.kind == "causal" or condition.tokens is None:
            causal = True
            continue
        whole = inside.gather(condition.tokens, 1)
        rows = _of_queries(inside, mask, condition.rows, queries)
        if not torch.equal(rows, torch.arange(whole.shape[0])):
            whole = whole[rows.to(whole.device)]
        if condition.kind == "document":
            documents = joined(documents, whole)
        elif condition.kind == "key":
            keys = whole.bool() if keys is None else keys & whole.bool()
        else:
            distances.append((whole, condition))
    low, high = 0 if causal else None, None
    for positions, condition in distances:
        by_one = condition.high not in (None, 0) or condition.low not in (None, 0)
        if not _in_order(positions, documents, keys, by_one):
            raise refused(
                inside,
                "compares numbers of its tokens that are not their positions in the sequence, and makes an attention mask of that",
                _IN_ORDER,
            )
        if condition.low is not None:
            low = condition.low if low is None else max(low, condition.low)
        if condition.high is not None:
            high = condition.high if high is None else min(high, condition.high)
    said = mask.answers[queries, purpose] = replace(_span(inside, low, high), keys=keys, documents=documents)
    return said


def joined(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Documents that are the same where two numberings (B|1, S) say so both."""
    if one is None or other is None:
        return other if one is None else one
    if one is other:
        return one
    one, other = (torch.unique(x, return_inverse=True)[1] for x in (one, other))
    return one * (other.max() + 1) + other


def both(one: AttentionMask, documents: Tensor | None) -> AttentionMask:
    """A mask that keeps to documents, too."""
    return one if documents is None else replace(one, documents=joined(one.documents, documents))


def _of_queries(inside: Inside, mask: PairMask, rows: Tensor, queries: Sequence[int]) -> Tensor:
    """Which row counts, for each of the queries' (B,); of a single one if all are alike."""
    has_heads = len(queries) > 1
    if rows.numel() == 1:
        return rows.reshape(1)
    wide = rows.expand(tuple(queries))
    if has_heads:
        if not bool((wide == wide[..., :1]).all()):
            raise refused(
                inside,
                f"has an attention mask {tuple(mask.shape)} with an entry for each of its heads",
                "Give documents (batch, tokens) a dimension for heads: mask[:, None].",
            )
        wide = wide[..., 0]
    return wide.reshape(-1)


def _span(inside: Inside, low: int | None, high: int | None) -> AttentionMask:
    """A mask of the distances from `low` to `high`, a query's position less the key's."""
    if low == 0:
        if high is None:
            return AttentionMask(True)
        if high >= 0:
            return AttentionMask(True, high + 1)
    elif low is None and high is None:
        return AttentionMask()
    elif low is not None and high is not None and low == -high:
        return AttentionMask(False, high + 1)
    raise refused(
        inside,
        f"has an attention mask of keys at distances from {'any' if low is None else low} to {'any' if high is None else high} before their query",
        "Causal attention (from 0), and windows that are causal (from 0 to w) or as wide on both sides (from -w to w) can be kept.",
    )


def _in_order(positions: Tensor, documents: Tensor | None, keys: Tensor | None, by_one: bool) -> bool:
    """Whether numbers (B|1, S) grow with the tokens of each document, as fast as their places if `by_one`.

    Documents in which no key is seen do not matter.
    """
    length = positions.shape[-1]
    rows = max(x.shape[0] for x in (positions, documents, keys) if x is not None)
    positions = positions.long().expand(rows, length)
    number = torch.zeros_like(positions) if documents is None else documents.long().expand(rows, length)
    number = torch.unique(number, return_inverse=True)[1]
    place = number.argsort(dim=-1, stable=True)
    number, positions = number.gather(-1, place), positions.gather(-1, place)
    step = positions.diff(dim=-1)
    fine = step == place.diff(dim=-1) if by_one else step > 0
    fine = fine | (number.diff(dim=-1) != 0)
    if keys is not None:
        seen = keys.expand(rows, length).long().gather(-1, place)
        count = torch.zeros(rows, int(number.max()) + 1, dtype=torch.int64, device=seen.device)
        count = count.scatter_add(-1, number, seen)
        fine = fine | (count.gather(-1, number)[:, 1:] == 0)
    return bool(fine.all())

"""Which heads each rank computes where ranks share them, and which key and value heads serve those."""

from __future__ import annotations

from lightning_5d.mesh import nearest_divisor
from lightning_5d.parallelism import Problem

Heads = tuple[tuple[int, ...], ...]
"""The heads of each rank, in the order in which it holds them."""


def heads_problem(heads: int, kv_heads: int, ranks: int) -> Problem | None:
    """What is wrong with sharing the heads of an attention among ranks, if anything.

    Args:
        heads: Query heads, of this rank alone where the tensor axis shares them already.
        kv_heads: Key and value heads, likewise. Fewer than `ranks` are repeated, so any number works that serves equally many query heads.
        ranks: Ranks that exchange heads.
    """
    if kv_heads < 1 or heads % kv_heads:
        good = nearest_divisor(heads, max(kv_heads, 1))
        return Problem(
            f"{kv_heads} key and value heads do not serve {heads} query heads equally.",
            f"The nearest number that does is {good}.",
        )
    if heads % ranks:
        good = nearest_divisor(heads, ranks)
        return Problem(
            f"Ulysses over {ranks} ranks cannot share {heads} query heads: each rank computes whole heads, equally many.",
            f"The nearest number of ranks that can is {good}; method='ring' and method='all_gather' share no heads.",
        )
    return None


def query_heads(heads: int, ranks: int) -> Heads:
    """The query heads of each rank."""
    each = heads // ranks
    return tuple(tuple(range(rank * each, (rank + 1) * each)) for rank in range(ranks))


def kv_heads(heads: int, kv: int, ranks: int) -> Heads:
    """The key and value heads that each rank's query heads need, equally many for each rank.

    Those of a rank serve equally many of its query heads, one after the other. Where that takes it, a head occurs more than once.
    """
    needed = [tuple(head * kv // heads for head in own) for own in query_heads(heads, ranks)]
    if kv % ranks == 0 or ranks % kv == 0:
        return tuple(tuple(sorted(set(own))) for own in needed)
    return tuple(needed)

"""Tokens to experts and back: sort, send, compute, return, weighted sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightning_5d.expert_parallel.exchange import TokenExchange

Drop = Literal["probability", "position"]
"""Which tokens an expert over its capacity leaves out: those with the smallest weights, or the last ones."""


@dataclass(frozen=True)
class Capacity:
    """A limit on the tokens of an expert.

    Attributes:
        factor: An expert takes ``ceil(factor * tokens * top_k / experts)`` of a microbatch.
        drop: Which it leaves out beyond that.
    """

    factor: float
    drop: Drop = "probability"


def kept_by_capacity(index_NK: Tensor, weights_NK: Tensor, experts: int, capacity: Capacity) -> Tensor:
    """Which choices are kept, as booleans (N, K), of all tokens of a microbatch."""
    raise NotImplementedError


def through_experts(
    hidden_ND: Tensor,
    index_NK: Tensor,
    weights_NK: Tensor,
    experts: int,
    compute: Callable[[Tensor, Tensor], Tensor],
    exchange: TokenExchange | None = None,
    kept_NK: Tensor | None = None,
) -> Tensor:
    """The weighted sum of what each token's experts make of it, as (N, D).

    All ranks of `exchange` call it together, with any number of tokens, none included, and with any choice of experts. Gradients reach `hidden_ND`,
    `weights_NK` and what `compute` uses, which takes part also where no row arrives.

    Args:
        hidden_ND: The tokens.
        index_NK: The experts of each, K of all E.
        weights_NK: Their weights.
        experts: E.
        compute: ``(rows_SD, counts_M) -> (S, D)`` for the M experts of this rank, rows sorted by expert.
        exchange: The ranks that hold the experts, E / M of them in order; ``None`` if this one holds all.
        kept_NK: Choices that are not left out.
    """
    raise NotImplementedError

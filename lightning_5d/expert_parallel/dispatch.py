"""Tokens to experts and back: sort, send, compute, return, weighted sum."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_5d.expert_parallel.exchange import Routes, TokenExchange
from lightning_5d.expert_parallel.permutation import Empty, gather_rows, sort_choices, weighted_sum
from lightning_5d.first_derivatives import of_spread_experts
from lightning_5d.hidden_operations import hidden_operations
from lightning_5d.tensor_parallel.axis import Arriving

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


def limit_of(tokens: int, top_k: int, experts: int, factor: float) -> int:
    """How many tokens of a microbatch an expert takes."""
    # The decimal that a person wrote: 1.1 * 100 is 110, and not a little more.
    return math.ceil(Fraction(repr(factor)) * tokens * top_k / experts)


def is_of_somebody(index: Tensor, experts: int) -> Tensor:
    """Which choices are of an expert that there is, as booleans; many models write -1, or the number of experts, for none."""
    return (index >= 0) & (index < experts)


def kept_by_capacity(index_NK: Tensor, weights_NK: Tensor, experts: int, capacity: Capacity) -> Tensor:
    """Which choices are kept, as booleans (N, K), of all tokens of a microbatch.

    Of choices with equal weights the earlier token's comes first, so that the decision is the same wherever it is made.
    """
    tokens, top_k = index_NK.shape
    limit = limit_of(tokens, top_k, experts, capacity.factor)
    # What is nobody's waits in a queue of its own.
    index = index_NK.masked_fill(~is_of_somebody(index_NK, experts), experts).reshape(-1)
    if capacity.drop == "probability":
        by_weight = weights_NK.detach().reshape(-1).argsort(descending=True, stable=True)
        order = by_weight[index[by_weight].argsort(stable=True)]
    else:
        order = index.argsort(stable=True)
    counts = torch.bincount(index, minlength=experts)
    starts = counts.cumsum(0) - counts
    queue = torch.arange(len(index), device=index.device) - starts[index[order]]
    kept = torch.empty_like(index, dtype=torch.bool)
    kept[order] = queue < limit
    return kept.view(tokens, top_k)


def through_experts(
    hidden_ND: Tensor,
    index_NK: Tensor,
    weights_NK: Tensor,
    experts: int,
    compute: Callable[[Tensor, Tensor], Tensor],
    exchange: TokenExchange | None = None,
    kept_NK: Tensor | None = None,
    layer: int = 0,
    meanwhile: Callable[[], None] | None = None,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Tensor:
    """The weighted sum of what each token's experts make of it, as (N, D).

    All ranks of `exchange` call it together, with any number of tokens, none included, and with any choice of experts. Gradients reach
    `hidden_ND`, `weights_NK` and what `compute` uses, which takes part also where no row arrives.

    Args:
        hidden_ND: The tokens.
        index_NK: The experts of each, K of all E.
        weights_NK: Their weights.
        experts: E.
        compute: ``(rows_SD, counts_M) -> (S, D)`` for the M experts of this rank, rows sorted by expert.
        exchange: The ranks that hold the experts, E / M of them in order; ``None`` if this one holds all.
        kept_NK: Choices that are not left out.
        layer: The number of the layer, which is the same on all ranks of `exchange`.
        meanwhile: Called once, while tokens travel.
        around: Makes contexts for all that is not `meanwhile`.
    """
    with around():
        way = Way(hidden_ND, index_NK, experts, exchange, kept_NK, layer)
        way.start_dispatch()
    if meanwhile is not None:
        meanwhile()
    with around():
        way.start_return(compute(way.arrived(), way.counts_M))
        return way.finish(weights_NK)


class Way:
    """The way of one batch of tokens to their experts and back, step by step; `through_experts` takes it in one go.

    ```python
    way = Way(hidden_ND, index_NK, experts, exchange)
    way.start_dispatch()
    ...  # something else: another batch, shared experts
    out_SD = compute(way.arrived(), way.counts_M)
    way.start_return(out_SD)
    ...  # something else
    out_ND = way.finish(weights_NK)
    ```

    Ranks take the steps of all ways that are under way in one order; backward, they come in the reverse order by themselves. To begin
    with, choices are sorted, and the ranks tell each other how many rows will come.

    Args:
        hidden_ND: The tokens.
        index_NK: The experts of each.
        experts: How many there are.
        exchange: The ranks that hold them; ``None`` if this one holds all.
        kept_NK: Choices that are not left out.
        layer: The number of the layer, which is the same on all of these ranks.
    """

    def __init__(
        self,
        hidden_ND: Tensor,
        index_NK: Tensor,
        experts: int,
        exchange: TokenExchange | None = None,
        kept_NK: Tensor | None = None,
        layer: int = 0,
    ) -> None:
        self._exchange, self._dtype, self._size = exchange, hidden_ND.dtype, hidden_ND.shape[1]
        self._routes: Routes | None = None
        with hidden_operations():
            self._permutation = sort_choices(index_NK, experts, kept_NK)
            if exchange is not None:
                self._routes = exchange.routes(self._permutation.counts_E, self._size * hidden_ND.itemsize, layer)
        self._hidden: Tensor | None = hidden_ND
        self._rows: int | None = None
        # Rows, or what stands for them beside the way that they take.
        self._under_way: tuple[Tensor, _Crossing | None] | None = None

    @cached_property
    def counts_M(self) -> Tensor:
        """Rows that come to each of this rank's experts; on the CPU."""
        with hidden_operations():
            return self._permutation.counts_E.cpu() if self._routes is None else self._routes.received_M

    def start_dispatch(self) -> None:
        """Starts to send the tokens to their experts."""
        hidden, self._hidden = self._hidden, None
        if hidden is None:
            raise RuntimeError("These tokens have been sent already.")
        crossing = self._crossing(back=False)
        rows = gather_rows(hidden, self._permutation, self._empty, crossing)
        self._under_way = rows, crossing

    def arrived(self) -> Tensor:
        """The rows for this rank's experts, (S, D), by expert."""
        arrived, crossing = self._taken()
        if crossing is not None:
            arrived = _Wait.apply(arrived, crossing)  # type: ignore[no-untyped-call]
        self._rows = len(arrived)
        return arrived

    def start_return(self, out_SD: Tensor) -> None:
        """Starts to send back what has become of those rows.

        Raises:
            ValueError: If it is not one row for each, of the same size.
        """
        if tuple(out_SD.shape) != (self._rows, self._size):
            raise ValueError(f"Experts made {tuple(out_SD.shape)} of {self._rows} rows of {self._size}.")
        crossing = self._crossing(back=True)
        if crossing is not None:
            out_SD = _Start.apply(out_SD, crossing)  # type: ignore[no-untyped-call]
        self._under_way = out_SD, crossing

    def finish(self, weights_NK: Tensor) -> Tensor:
        """The weighted sums, (N, D), in the dtype of the tokens."""
        rows, crossing = self._taken()
        return weighted_sum(rows, weights_NK, self._permutation, self._dtype, self._empty, crossing)

    @property
    def _empty(self) -> Empty | None:
        return None if self._exchange is None else self._exchange.empty

    def _crossing(self, back: bool) -> _Crossing | None:
        if self._exchange is None or self._routes is None:
            return None
        return _Crossing(self._exchange, self._routes, back)

    def _taken(self) -> tuple[Tensor, _Crossing | None]:
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            raise RuntimeError("Nothing is under way.")
        return under_way


# [Note: two nodes of a crossing]
# Rows set out in one node of the graph and arrive in another, so that something else may be computed in between; backward, gradients set out in
# the second and arrive in the first, and what was computed in between has its backward in between. The engine takes nodes that are
# ready in the reverse order of their making, whatever the router chose, so ranks meet. What goes from node to node is a ticket without elements,
# which stands for the rows, and the `_Crossing` beside it. The first node of the way there also puts rows into their order, and the last one of the
# way back adds them up.
#
# Selective recomputation sees nothing of all this: how many operations it takes depends on the choices, and memory that others read serves
# again. A block that is computed again sends again.
class _Crossing:
    """Rows, or gradients of rows, between their start and their arrival."""

    def __init__(self, exchange: TokenExchange, routes: Routes, back: bool) -> None:
        self.exchange, self.routes, self.back = exchange, routes, back
        self.arriving: Arriving | None = None

    def start(self, rows: Tensor, *, gradients: bool) -> Tensor:
        exchange, back = self.exchange, self.back != gradients
        with hidden_operations():
            self.arriving = (exchange.start_return if back else exchange.start_dispatch)(rows, self.routes)
        return rows.new_empty(0)

    def wait(self) -> Tensor:
        arriving, self.arriving = self.arriving, None
        if arriving is None:
            raise RuntimeError("No rows are under way: a backward of experts was run in parts, or has failed before.")
        with hidden_operations():
            return arriving.wait()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, crossing: _Crossing) -> Tensor:
        ctx.crossing = crossing
        return crossing.start(rows, gradients=False)

    # What arrives has no graph: second derivatives would be those of a part of the layer.
    @staticmethod
    @of_spread_experts
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.crossing.wait(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, crossing: _Crossing) -> Tensor:
        ctx.crossing = crossing
        return crossing.wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.crossing.start(grad, gradients=True), None

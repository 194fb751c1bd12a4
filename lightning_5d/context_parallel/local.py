"""A rank's queries and the keys of one place after the other, as they come to hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lightning_5d.context_parallel import kernels
from lightning_5d.context_parallel.attention import accumulator
from lightning_5d.context_parallel.cut import SequenceCut
from lightning_5d.context_parallel.inputs import of_nothing
from lightning_5d.context_parallel.joining import Joined, RowSum, rows_of
from lightning_5d.context_parallel.masks import AttentionMask
from lightning_5d.context_parallel.tiles import Plan, Span, Tile, tile_mask
from lightning_5d.context_parallel.tiles import plan as plan_of

# Masks of tiles are kept for the other layers of a step up to so many bytes; beyond, each call makes its own.
_KEPT_BYTES = 64 << 20


class Meeting:
    """How a place's queries meet keys: what the kernels have to be told of each tile.

    Args:
        mask: What queries see.
        cut: Who holds what.
        place: The place that holds the queries.
        scale: Of the scores.
        kept: Where masks of tiles are kept for other layers of a step.

    Attributes:
        plan: The tiles.
    """

    def __init__(
        self, mask: AttentionMask, cut: SequenceCut, place: int, scale: float, kept: TileMasks | None = None
    ) -> None:
        self._mask, self._cut, self._place, self._scale, self._kept = mask, cut, place, scale, kept
        self.plan: Plan = plan_of(mask, cut, place)

    def of(self, tile: Tile, owner: int, device: torch.device) -> dict[str, Any]:
        """How the queries see the keys of `owner` in one of its tiles."""
        return {"causal": tile.kind == "causal", "mask": self._mask_of(tile, owner, device), "scale": self._scale}

    def _mask_of(self, tile: Tile, owner: int, device: torch.device) -> Tensor | None:
        if tile.kind != "masked":
            return None
        make = partial(tile_mask, self._mask, self._cut, tile, self._place, owner, device)
        return make() if self._kept is None else self._kept.get((self._cut, owner, tile), make)


class TileMasks:
    """The masks of a step's tiles, made once for all layers as far as there is room."""

    def __init__(self) -> None:
        self._found: dict[tuple[SequenceCut, int, Tile], Tensor] = {}
        self._nbytes = 0

    def get(self, key: tuple[SequenceCut, int, Tile], make: Callable[[], Tensor]) -> Tensor:
        """The mask of one, made if it is not there."""
        if (found := self._found.get(key)) is None:
            found = make()
            if self._nbytes + found.nbytes <= _KEPT_BYTES:
                self._found[key] = found
                self._nbytes += found.nbytes
        return found


class Outputs:
    """Outputs joined over the keys of all places.

    Args:
        q: (B, H, s, D).
        meeting: How they meet the keys.
    """

    def __init__(self, q: Tensor, meeting: Meeting) -> None:
        self._q, self._meeting, self._joined = q, meeting, Joined(q, meeting.plan.blind)

    def add(self, owner: int, k: Tensor, v: Tensor, first: int = 0) -> None:
        """Attends to the keys and values of a place, (B, K, s, D) each, or to their rows from `first` on, as many as are needed."""
        for tile in self._meeting.plan.tiles[owner]:
            found = kernels.forward(
                rows_of(self._q, tile.queries),
                rows_of(k, tile.keys, first),
                rows_of(v, tile.keys, first),
                **self._meeting.of(tile, owner, k.device),
            )
            self._joined.add(tile.queries, *found)

    def whole(self) -> tuple[Tensor, Tensor]:
        """The outputs (B, H, s, D), zero where a query has seen nothing, and their log-sum-exp as `Backward` wants it."""
        out, lse = self._joined.result()
        return out, kernels.blind(lse) if self._meeting.plan.blind else lse


class Backward:
    """The way back through `Outputs`.

    Args:
        g: Gradient of the outputs, (B, H, s, D).
        q: The queries.
        out: The outputs.
        lse: Their log-sum-exp.
        meeting: How the queries met the keys.
    """

    def __init__(self, g: Tensor, q: Tensor, out: Tensor, lse: Tensor, meeting: Meeting) -> None:
        self._g, self._q, self._out, self._lse, self._meeting = g, q, out, lse, meeting
        self._sum = RowSum(q.shape[2], accumulator(q.dtype))

    def add(
        self, owner: int, k: Tensor, v: Tensor, first: int = 0, rows: Span | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """What these queries contribute to the gradients of a place's keys and values; ``None`` if they see none of them.

        Args:
            owner: The place.
            k: Its keys, from row `first` on.
            v: Its values, likewise.
            first: The first row that is here.
            rows: The rows whose gradients are wanted; all of the place's if ``None``.
        """
        tiles = self._meeting.plan.tiles[owner]
        start, stop = (0, k.shape[2]) if rows is None else rows
        sums = [RowSum(stop - start, accumulator(x.dtype)) for x in (k, v)]
        for tile in tiles:
            found = kernels.backward(
                rows_of(self._g, tile.queries),
                rows_of(self._q, tile.queries),
                rows_of(k, tile.keys, first),
                rows_of(v, tile.keys, first),
                rows_of(self._out, tile.queries),
                rows_of(self._lse, tile.queries),
                **self._meeting.of(tile, owner, k.device),
            )
            self._sum.add(tile.queries, found.q_BHqD, ours=True)
            if len(tiles) == 1 and tile.keys == (start, stop):
                return found.k_BKkD, found.v_BKkD
            keys = (tile.keys[0] - start, tile.keys[1] - start)
            for total, part in zip(sums, (found.k_BKkD, found.v_BKkD), strict=True):
                total.add(keys, part, ours=True)
        return (sums[0].whole(k), sums[1].whole(v)) if tiles else None

    def queries(self) -> Tensor:
        """The gradient of the queries, in their dtype."""
        return self._sum.result(self._q)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> Tensor:
    """Softmax attention over whole sequences, with a graph.

    Args:
        q: (B, H, S, D), all tokens in the order of positions.
        k: (B, K, S, D).
        v: (B, K, S, D).
        mask: What queries see.
        scale: Of the scores.

    Returns:
        (B, H, S, D); rows of queries that may see nothing are zero.
    """
    if not q.numel():
        return of_nothing(q, k, v)
    meeting = Meeting(mask, SequenceCut(q.shape[2], 1), 0, scale)
    out: Tensor = _Attend.apply(q, k, v, meeting)  # type: ignore[no-untyped-call]
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, meeting: Meeting) -> Tensor:
        outputs = Outputs(q, meeting)
        outputs.add(0, k, v)
        out, lse = outputs.whole()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.meeting = meeting  # type: ignore[attr-defined]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        backward = Backward(g, q, out, lse, ctx.meeting)
        dk, dv = backward.add(0, k, v) or (torch.zeros_like(k), torch.zeros_like(v))
        return backward.queries(), dk.to(k.dtype), dv.to(v.dtype), None

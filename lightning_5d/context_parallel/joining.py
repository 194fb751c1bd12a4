"""Parts that become a whole: outputs over parts of the keys, and gradients over parts of the rows.

Source: the join through log-sum-exp is that of Dao et al., "FlashAttention" (2022), section 3.1.
"""

# [Note: joining]
# Parts (out, lse) and (part, its lse) of the same queries join to out + w (part - out) with w = sigmoid(its lse - lse), and
# log(e^lse + e^its). No exponential of a score is ever formed, so nothing overflows however large scores are. Of -inf and -inf, two
# parts in which a query sees nothing, the difference is nan, and w has to be 0.

from __future__ import annotations

import torch
from torch import Tensor

from lightning_5d.context_parallel.attention import accumulator
from lightning_5d.context_parallel.tiles import Span


class Joined:
    """The output over the keys so far, in fp32 once it is joined of parts."""

    def __init__(self, q: Tensor, blind: bool) -> None:
        self._q, self._blind = q, blind
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, rows: Span, part: Tensor, lse: Tensor) -> None:
        """Joins a part of the keys to some rows of queries; it is not used otherwise."""
        if self._out is None and rows == (0, self._q.shape[2]):
            self._out, self._lse = part, lse
            return
        own_out, own_lse = self._whole()
        target, total = rows_of(own_out, rows), rows_of(own_lse, rows)
        weight = torch.sigmoid(lse - total)
        if self._blind:
            weight.nan_to_num_(0.0)
        target.lerp_(part.to(target.dtype), weight.unsqueeze(-1))
        torch.logaddexp(total, lse, out=total)

    def result(self) -> tuple[Tensor, Tensor]:
        """The output in the dtype of the queries, and its log-sum-exp."""
        if self._out is None or self._lse is None:
            out, lse = self._whole()
        else:
            out, lse = self._out, self._lse
        return out.to(self._q.dtype), lse

    def _whole(self) -> tuple[Tensor, Tensor]:
        dtype = accumulator(self._q.dtype)
        if self._out is None or self._lse is None:
            batch, heads, rows, size = self._q.shape
            # Heads inside of tokens, as the kernels lay outputs out and models want them.
            self._out = self._q.new_zeros((batch, rows, heads, size), dtype=dtype).transpose(1, 2)
            self._lse = self._q.new_full((batch, heads, rows), -torch.inf, dtype=dtype)
        elif self._out.dtype != dtype:
            self._out = self._out.to(dtype)
        return self._out, self._lse


class RowSum:
    """A sum of parts over some rows each, in the order in which they come, without a zero to begin with where one has all rows."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        self._rows, self._dtype = rows, dtype
        self._total: Tensor | None = None
        self._waiting: dict[Span, Tensor] = {}

    def add(self, rows: Span, part: Tensor, *, ours: bool) -> None:
        """Adds (B, heads, rows, D); what is `ours` may be kept and written to."""
        if self._total is not None:
            rows_of(self._total, rows).add_(part)
        elif rows == (0, self._rows):
            total = part.to(self._dtype, copy=not ours)
            for span, early in self._waiting.items():
                rows_of(total, span).add_(early)
            self._waiting.clear()
            self._total = total
        elif rows in self._waiting:
            self._waiting[rows].add_(part)
        else:
            self._waiting[rows] = part.to(self._dtype, copy=not ours)

    def whole(self, like: Tensor) -> Tensor:
        """The sum over all rows."""
        if self._total is not None:
            return self._total
        batch, heads, _, size = like.shape
        total = like.new_zeros((batch, self._rows, heads, size), dtype=self._dtype).transpose(1, 2)
        for span, early in self._waiting.items():
            rows_of(total, span).add_(early)
        self._total = total
        return total

    def result(self, like: Tensor) -> Tensor:
        """The sum over all rows, in the dtype of another tensor."""
        return self.whole(like).to(like.dtype)


def rows_of(x: Tensor, rows: Span, first: int = 0) -> Tensor:
    """Rows of the third dimension, of which the first one has a number."""
    start, stop = rows[0] - first, rows[1] - first
    return x if start == 0 and stop == x.shape[2] else x[:, :, start:stop]

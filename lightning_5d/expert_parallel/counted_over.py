"""Sums over the tokens of routers, where several ranks see them."""

# [Note: gradients of what is counted over ranks]
# A balance loss L is a function of S, the sum over the ranks r of a microbatch of x_r, which each makes of its own rows. It leaves the block, is
# added to the loss at the user's level, and so comes back there as one gradient g = dL/dS, whole and the same on all ranks. What has to reach
# a weight w is g * sum_r dx_r/dw. Who adds up over r, and by what, is not the same along all axes:
#
# - context: gradients inside of doors are c times those of the rank's own tokens, as the data axes average them over the c context ranks
#   (`context_parallel/doors.py`). A scalar leaves a door as it is, with g on each rank. So the backward of the sum is c * g, and the average
#   over ranks of c * g * dx_r/dw is the sum. The mean that a rank would make of its own tokens would instead give L / c, or a loss of its own
#   on each rank.
# - tensor, with sequence parallelism: gradients of a block's weights are summands, which are added up and not averaged
#   (`tensor_parallel/partial_gradients.py`). So the backward is g, as everywhere where values leave summed and gradients stay.
# - tensor, without: all ranks have the same rows, nothing is summed, and each computes the whole gradient, as of any replicated weight.
# - data: each data rank has a loss of its own microbatch, and gradients are averaged. Only numbers without gradients (loads, f of a global
#   balance loss) are summed over them.
#
# The sum has the same bits on all ranks, so losses do, which the context axis compares where they leave a door.
# Nothing is sent backward: g has to be the same on all ranks, as that of a loss is. Whoever would multiply a rank's own tokens with S inside of a
# door, or between blocks whose sequence is cut, would have to sum gradients over the ranks as well.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_5d.expert_parallel.counted import Counted, Scope
from lightning_5d.expert_parallel.row_ranks import Differing, RowRanks


class CountedOver(Counted):
    """Counts the rows of all ranks of a microbatch, or of a step, each token once, and no padding. One for each router.

    Which ranks have different rows is looked at when a router asks which of its rows are `real`. Sums may come later: a load that forwards have
    counted is added up by the optimizer, outside of all doors and blocks.

    Args:
        ranks: The ranks.
        holders: Gives the ranks that hold the same router, if there are others.
    """

    def __init__(self, ranks: RowRanks, holders: Callable[[], dist.ProcessGroup | None] | None = None) -> None:
        self.ranks, self._holders = ranks, holders
        self._differing: Differing | None = None

    @property
    @override
    def differing(self) -> Differing:
        """Which ranks had different rows when the router ran last."""
        return self.ranks.differing if self._differing is None else self._differing

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    @override
    def real(self, rows: int) -> Tensor | None:
        self._differing = self.ranks.differing
        return self.ranks.real(rows)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    @override
    def sum(self, x: Tensor, scope: Scope) -> Tensor:
        return self.ranks.sum(x, scope, self.differing)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    @override
    def sum_of_holders(self, x: Tensor) -> Tensor:
        group = None if self._holders is None else self._holders()
        if group is not None:
            x = x.clone()
            dist.all_reduce(x, group=group)
        return x

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    @override
    def sum_of_microbatch(self, x: Tensor) -> Tensor:
        if not (x.requires_grad and torch.is_grad_enabled()):
            total: Tensor = self.sum(x, "microbatch")
            return total
        return cast(Tensor, _Sum.apply(x, self))  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Counted:
        # A copy of a module computes by itself, as its forwards do.
        return Counted()

    def __reduce__(self) -> Any:
        return Counted, ()


class _Sum(torch.autograd.Function):
    """The sum over the ranks of a microbatch; see [Note: gradients of what is counted over ranks]."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, counted: CountedOver) -> Tensor:
        ctx.factor = counted.ranks.context_ranks if counted.differing.context else 1
        total: Tensor = counted.sum(x, "microbatch")
        return total.view_as(x)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad if ctx.factor == 1 else grad * ctx.factor, None

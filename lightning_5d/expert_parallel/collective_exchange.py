"""Rows between ranks that hold different experts, on the collectives of their process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_5d.expert_parallel.exchange import Routes, TokenExchange, check_divides, check_same
from lightning_5d.tensor_parallel.axis import Arriving


class CollectiveRoutes(Routes):
    """Routes whose numbers are on their way.

    Args:
        work: What brings them.
        sent: Rows for each expert of each rank, the bytes of a row, and the layer.
        received: What the others have said.
        check: Looks at bytes and layers, by rank.
    """

    def __init__(
        self,
        work: dist.Work | None,
        sent: Tensor,
        received: Tensor,
        check: Callable[[Sequence[int], Sequence[int]], None],
    ) -> None:
        self._work, self._pair, self._check = work, (sent, received), check

    @property
    @override
    def sent_RM(self) -> Tensor:
        return self._numbers[0]

    @property
    @override
    def received_RM(self) -> Tensor:
        return self._numbers[1]

    @cached_property
    def _numbers(self) -> tuple[Tensor, Tensor]:
        if self._work is not None:
            self._work.wait()
        sent, received = torch.stack(self._pair).cpu()
        self._check(*received[:, -2:].t().tolist())
        return sent[:, :-2], received[:, :-2]


class CollectiveTokenExchange(TokenExchange):
    """The exchange by all-to-all, with a local permutation between the two orders of rows.

    Args:
        group: The ranks.
        device: Where their tensors are.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._device = device
        self._agreed: set[int] = set()

    @override
    def routes(self, counts_E: Tensor, row_bytes: int, layer: int = 0) -> Routes:
        experts = len(counts_E)
        check_divides(self.size, experts)
        if experts not in self._agreed:
            # Messages of different sizes end a process of gloo, or are not noticed; later ones have one size then.
            self._agree_on(experts)
        sent = counts_E.new_full((self.size, experts // self.size + 2), row_bytes, dtype=torch.int64)
        sent[:, -1] = layer
        sent[:, :-2] = counts_E.view(self.size, -1)
        sent = sent.to(self._device)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        return CollectiveRoutes(work, sent, received, self.check_said)

    def _agree_on(self, experts: int) -> None:
        own = torch.tensor([experts], device=self._device)
        each = own.new_empty(self.size)
        dist.all_gather_single(each, own, group=self.group)
        check_same("experts", each.tolist(), self.rank)
        self._agreed.add(experts)

    @override
    def start_dispatch(self, rows_SD: Tensor, routes: Routes) -> Arriving:
        sent, received = routes.sent_RM.sum(1).tolist(), routes.received_RM.sum(1).tolist()
        return self._start(rows_SD, sent, received, routes.received_RM)

    @override
    def start_return(self, rows_SD: Tensor, routes: Routes) -> Arriving:
        sent, received = routes.sent_RM.sum(1).tolist(), routes.received_RM.sum(1).tolist()
        return self._start(exchanged(rows_SD, routes.received_RM.t()), received, sent, None)

    def _start(self, rows: Tensor, sent: list[int], received: list[int], pieces: Tensor | None) -> Arriving:
        rows = rows.detach().contiguous()
        self.traffic.add("all_to_all", rows.nbytes)
        out = rows.new_empty((sum(received), rows.shape[1]))
        work = dist.all_to_all_single(out, rows, received, sent, group=self.group, async_op=True)
        return _Rows(work, rows, out, pieces)


class _Rows(Arriving):
    def __init__(self, work: dist.Work | None, sent: Tensor, received: Tensor, pieces: Tensor | None) -> None:
        self._work, self._received, self._pieces = work, received, pieces
        self._sent: Tensor | None = sent

    def wait(self) -> Tensor:
        """See `Arriving.wait`."""
        if self._work is not None:
            self._work.wait()
        self._work = self._sent = None
        return self._received if self._pieces is None else exchanged(self._received, self._pieces)


def exchanged(rows: Tensor, pieces_AB: Tensor) -> Tensor:
    """Rows that lie by A, and for each of A by B, by B and then by A.

    Args:
        rows: The rows.
        pieces_AB: How many there are of each kind.
    """
    first, second = pieces_AB.shape
    if first == 1 or second == 1:
        return rows
    parts = torch.split(rows, pieces_AB.flatten().tolist())
    return torch.cat([parts[a * second + b] for b in range(second) for a in range(first)])

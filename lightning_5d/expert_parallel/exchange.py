"""What the ranks that hold different experts send each other: numbers of tokens, tokens, and what has become of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_5d.tensor_parallel.axis import Arriving, RankExchange

_CPU = torch.device("cpu")


class Routes(ABC):
    """How many rows go where, and come from where. R ranks, each with M experts of its own, in the order of the ranks."""

    @property
    @abstractmethod
    def sent_RM(self) -> Tensor:
        """Rows of this rank for expert m of rank r; on the CPU."""

    @property
    @abstractmethod
    def received_RM(self) -> Tensor:
        """Rows of rank r for expert m of this rank; on the CPU. Waits for the other ranks where they have not said it yet."""

    @cached_property
    def received_M(self) -> Tensor:
        """Rows for each expert of this rank."""
        return self.received_RM.sum(0)


# [Note: two orders of rows]
# At home rows lie by expert, over all experts, as they were sorted: so they lie by rank, too. Where experts are they lie by expert of that
# rank, and for each expert by the rank they have come from: as a grouped product wants them. `start_dispatch` takes the first and gives the second,
# `start_return` the reverse. Each is the transpose of the other, so each is the other's backward.
class TokenExchange(RankExchange, ABC):
    """The exchanges between the ranks that hold different experts; every rank calls them in the same order, with any number of rows.

    The ``start_…`` methods return at once, the input must stay as it is until `Arriving.wait`, and something else (another batch, shared
    experts) may be computed in between. Traffic has this rank's own rows, too, as ``"all_to_all"``.

    Attributes:
        layers: Names of the layers whose experts they are, for errors.
    """

    layers: Sequence[str] = ()

    @abstractmethod
    def routes(self, counts_E: Tensor, row_bytes: int, layer: int = 0) -> Routes:
        """Tells the others how many rows go to each expert: they may hear of it with the first rows only.

        Args:
            counts_E: This rank's rows for each of all experts, integers.
            row_bytes: The size of a row.
            layer: Whose experts they are, as a number.

        Raises:
            ValueError: If the ranks do not divide the experts.
            RuntimeError: If another rank is at another layer, has other experts, or other rows; perhaps not before what it has said is needed.
        """

    def check_said(self, row_bytes: Sequence[int], layers: Sequence[int]) -> None:
        """Checks what each rank has said of its rows.

        Args:
            row_bytes: The size of a row, by rank.
            layers: Whose experts they are for, by rank.

        Raises:
            RuntimeError: If another rank has said something else.
        """
        for other, layer in enumerate(layers):
            if layer != layers[self.rank]:
                there, here = (self._named(number) for number in (layer, layers[self.rank]))
                raise RuntimeError(
                    f"Rank {other} of the expert group is at {there} where rank {self.rank} is at {here}: all of its ranks have to run the"
                    " same layers in one order, as each has experts that tokens of the others go to."
                )
        check_same("bytes in a row", row_bytes, self.rank)

    def _named(self, layer: int) -> str:
        return self.layers[layer] if layer < len(self.layers) else f"layer {layer}"

    @abstractmethod
    def start_dispatch(self, rows_SD: Tensor, routes: Routes) -> Arriving:
        """Starts to send rows, sorted by expert, to where the experts are; what arrives is (received, D), by own expert, then by rank."""

    @abstractmethod
    def start_return(self, rows_SD: Tensor, routes: Routes) -> Arriving:
        """Starts to send rows, as `start_dispatch` gave them, back to where they came from; what arrives is sorted by expert."""


def check_divides(ranks: int, experts: int) -> None:
    """Checks that each rank has as many experts as any other.

    Args:
        ranks: How many ranks there are.
        experts: How many experts there are.

    Raises:
        ValueError: If the ranks do not divide the experts.
    """
    if experts % ranks:
        raise ValueError(f"{ranks} ranks do not divide {experts} experts.")


def check_same(what: str, ranks: Sequence[int], rank: int) -> None:
    """Checks what each rank has said.

    Args:
        what: What they said.
        ranks: It, for each rank.
        rank: This rank.

    Raises:
        RuntimeError: If another rank has said something else.
    """
    for other, value in enumerate(ranks):
        if value != ranks[rank]:
            raise RuntimeError(
                f"Rank {other} of the expert group has {value} {what} where rank {rank} has {ranks[rank]}: its ranks have to run the same"
                " modules, in the same precision."
            )


def open_exchange(
    group: dist.ProcessGroup, device: torch.device = _CPU, *, shared_memory: bool = True
) -> TokenExchange:
    """The fastest way the ranks of a group can send each other rows; all of them call it.

    Args:
        group: The ranks.
        device: Where their tensors are.
        shared_memory: CPU ranks of one host read straight from each other's memory.
    """
    if device.type == "cpu" and shared_memory and group.size() > 1:
        from lightning_5d.expert_parallel.host_exchange import HostTokenExchange

        if (exchange := HostTokenExchange.connect(group)) is not None:
            return exchange
    from lightning_5d.expert_parallel.collective_exchange import CollectiveTokenExchange

    return CollectiveTokenExchange(group, device)

"""The expert axis at work: experts on other ranks than the tokens that go to them, inside Lightning's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_5d.expert_parallel.dispatch import Capacity, through_experts
from lightning_5d.expert_parallel.exchange import TokenExchange
from lightning_5d.expert_parallel.found import FoundExperts
from lightning_5d.expert_parallel.survey import found_experts
from lightning_5d.mesh import ParallelMesh
from lightning_5d.parallelism import Parallelized
from lightning_5d.replaced_forward import ReplacedForward

if TYPE_CHECKING:
    from lightning_5d.expert_parallel.expert import ExpertParallel


class SpreadExperts(Parallelized):
    """Experts spread over the ranks of a place of the pipeline.

    Args:
        module: The user's LightningModule, or this rank's stages of it.
        plugin: The settings.
        mesh: The ranks by axis.
        layers: The experts of the whole module, also those of other stages.
    """

    def __init__(
        self, module: nn.Module, plugin: ExpertParallel, mesh: ParallelMesh, layers: Sequence[FoundExperts]
    ) -> None:
        self._module, self._plugin, self._mesh, self._layers = module, plugin, mesh, layers
        self._here = found_experts(module)
        self._exchange: TokenExchange | None = None
        self._replaced: list[SpreadForward] = []

    @override
    def close(self) -> None:
        for forward in self._replaced:
            forward.remove()
        self._replaced.clear()
        if self._exchange is not None:
            self._exchange.close()

    @override
    def memory(self) -> Iterable[tuple[str, Tensor]]:
        if self._exchange is None:
            return
        for tensor in self._exchange.memory():
            yield "communication buffers", tensor
        for tensor in self._exchange.mapped():
            yield "memory of other ranks", tensor


class SpreadForward(ReplacedForward):
    """The forward of a module of experts: each token goes to where its experts are."""

    def __init__(self, found: FoundExperts, exchange: TokenExchange | None, capacity: Capacity | None) -> None:
        super().__init__(found.module)
        self._found, self._exchange, self._capacity = found, exchange, capacity

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """See `FoundExperts`."""
        raise NotImplementedError

    def remove(self) -> None:
        """Gives the module its own forward back."""
        if self.previous is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.forward = self.previous

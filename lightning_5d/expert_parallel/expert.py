"""The expert axis: `ExpertParallel`, which ranks hold which experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from lightning_5d.expert_parallel.dispatch import Drop
from lightning_5d.parallelism import Dtypes, Parallelism, Parallelized, Problem, RunContext

if TYPE_CHECKING:
    from lightning_5d.mesh import ParallelMesh
    from lightning_5d.plan import ParallelPlan


@dataclass(frozen=True)
class ExpertParallel(Parallelism):
    """Spreads the experts of MoE layers over ranks that have different tokens; each token is sent to its experts and back.

    It takes no ranks of its own: experts live on the data, context and tensor ranks of a place of the pipeline. ``size`` neighbours hold
    different experts, and ZeRO shards each rank's experts over those ranks that hold the same ones.

    Args:
        size: Ranks that hold different experts; divides the experts of each layer, and the ranks there are.
        tensor: Ranks of the tensor axis that cut each expert: 1 (experts are whole, and tensor ranks take part as the others do), or all.
        capacity_factor: An expert takes at most ``ceil(factor * tokens * top_k / experts)`` tokens of a microbatch; ``None`` for all.
        drop: Which tokens it leaves out beyond that: those it has the smallest weight for, or the last ones.

    Source: Lepikhin et al., "GShard" (2020); Fedus et al., "Switch Transformers" (2021), for capacity; Gale et al., "MegaBlocks" (2022), for
    layers that drop nothing; Liu et al., "MoE Parallel Folding" (2025), for experts over the ranks of several axes.
    """

    axis: ClassVar[str] = "expert"
    order: ClassVar[int] = 15

    size: int
    tensor: int = 1
    capacity_factor: float | None = None
    drop: Drop = "probability"

    def validate(self, context: RunContext) -> list[Problem]:
        """Checks sizes, and where the module is known its experts."""
        return []

    def parallelize(self, module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, dtypes: Dtypes) -> Parallelized:
        """Leaves on this rank its own experts."""
        return Parallelized()

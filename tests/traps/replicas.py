"""A plugin that only brings replicas: ranks of its axis must hold the same batch and end with the same weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning as L
from torch import nn

from lightning_5d import FiveD, Parallelism, ZeRO
from lightning_5d.mesh import ParallelMesh
from lightning_5d.parallelism import Dtypes, Parallelized, Size
from lightning_5d.plan import ParallelPlan
from tests.trainers import quiet

TRAINER = {"backend": None, "timeout": 50.0}
STAGES = [0, 1, 2, 3]


@dataclass(frozen=True)
class Replicas(Parallelism):
    """Stands for a tensor or pipeline axis whose ranks have nothing to share out."""

    axis: ClassVar[str] = "tensor"
    order: ClassVar[int] = 20
    name: str = "tp"
    size: int = 2

    def mesh_sizes(self) -> dict[str, Size]:
        return {self.name: self.size}

    def parallelize(self, module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, dtypes: Dtypes) -> Parallelized:
        return Parallelized()


def replicated(stage: int, ranks: int, axis: str = "tp", **arguments: Any) -> L.Trainer:
    """A quiet Trainer of `ranks` ranks, every two of which are replicas along `axis`."""
    return quiet(strategy=FiveD(ZeRO(stage=stage), Replicas(name=axis)), devices=ranks, **arguments)


def one_and_same(results: Sequence[Any]) -> Any:
    """What every rank returned, which must be the same on all."""
    assert all(result == results[0] for result in results), results
    return results[0]

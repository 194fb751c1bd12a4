"""An axis that only counts, for tests of what is made of the counts."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from lightning_5d.expert_parallel.load import ExpertLoads, count_by_hooks
from lightning_5d.expert_parallel.survey import found_experts
from lightning_5d.parallelism import Parallelism, Parallelized


class Counts(Parallelized):
    def __init__(self, module: nn.Module, loads: ExpertLoads) -> None:
        self.loads = loads
        here = [each for each in found_experts(module) if each.name in loads]
        self._handles = count_by_hooks(loads, here)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


@dataclass(frozen=True)
class Counting(Parallelism):
    axis: ClassVar[str] = "expert"
    order: ClassVar[int] = 15

    size: int = 1
    layers: tuple[tuple[str, int], ...] = ()

    def surveyed(self, module, plan):
        return Counting(self.size, tuple((each.name, each.count) for each in found_experts(module)))

    def parallelize(self, module, plan, mesh, dtypes):
        return Counts(module, ExpertLoads(dict(self.layers)))

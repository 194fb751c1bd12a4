"""The expert axis: `ExpertParallel`, which ranks hold which experts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, get_args

from torch import nn
from typing_extensions import override

from lightning_5d.expert_parallel.dispatch import Capacity, Drop
from lightning_5d.parallelism import Dtypes, Parallelism, Parallelized, Problem, RunContext
from lightning_5d.tensor_parallel.problems import generic

if TYPE_CHECKING:
    from lightning_5d.expert_parallel.found import FoundExperts
    from lightning_5d.mesh import ParallelMesh
    from lightning_5d.plan import ParallelPlan

DROPS: tuple[Drop, ...] = get_args(Drop)


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
        problems = [
            Problem(f"ExpertParallel({name}={value!r}) is not a whole number of at least 1.", "Use 1 or more.")
            for name, value in (("size", self.size), ("tensor", self.tensor))
            if not _is_count(value)
        ]
        factor = self.capacity_factor
        if factor is not None and (
            isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf
        ):
            what = f"ExpertParallel(capacity_factor={factor!r}) is not a number above 0."
            problems.append(Problem(what, "1.25 leaves a quarter of room; None takes all tokens."))
        if self.drop not in DROPS:
            what = f"ExpertParallel(drop={self.drop!r}) is unknown."
            problems.append(Problem(what, f"Use {' or '.join(map(repr, DROPS))}."))
        if problems:
            return problems
        found: Sequence[FoundExperts] | None = None
        if context.module is not None and self.is_asked_for:
            from lightning_5d.expert_parallel.survey import found_experts

            found = found_experts(context.module)
        problems += self._size_problems(context, found)
        if context.module is not None and found is not None:
            from lightning_5d.expert_parallel.compatibility import module_problems

            problems += module_problems(context.module, found, self)
        return problems

    @property
    def is_asked_for(self) -> bool:
        """Whether it does anything to experts; with its defaults it only has balance losses and loads counted over all ranks."""
        return self.size > 1 or self.tensor > 1 or self.capacity_factor is not None

    @property
    def capacity(self) -> Capacity | None:
        """The limit on tokens of an expert, if there is one."""
        return None if self.capacity_factor is None else Capacity(self.capacity_factor, self.drop)

    def _size_problems(self, context: RunContext, found: Sequence[FoundExperts] | None) -> list[Problem]:
        sizes = {axis: context.sizes.get(axis, 1) for axis in ("dp_shard", "cp", "tp")}
        problems = []
        if self.tensor not in (1, sizes["tp"]):
            what = f"ExpertParallel(tensor={self.tensor}): parts of an expert are on the ranks of the tensor axis, which has {sizes['tp']}."
            fix = (
                f"Use tensor=1 or tensor={sizes['tp']}."
                if sizes["tp"] > 1
                else f"Use tensor=1, or add TensorParallel({self.tensor})."
            )
            problems.append(Problem(what, fix))
        if self.tensor > 1:
            sizes["tp"] = 1
        ranks = math.prod(sizes.values())
        if self.size == 1:
            return problems
        written = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1 or axis == "dp_shard")
        if ranks == 1:
            what = f"ExpertParallel({self.size}): experts live on ranks with different tokens, and there is one such rank ({written})."
            problems.append(
                Problem(
                    what,
                    f"Use {self.size} times as many devices, of which ZeRO(size={self.size}) are data ranks, or leave it out.",
                )
            )
            return problems
        counts = sorted({each.count for each in found or ()})
        works = [n for n in range(1, ranks + 1) if ranks % n == 0 and all(count % n == 0 for count in counts)]
        degrees = f"a size of {_listed(works)} does."
        if ranks % self.size:
            what = f"ExpertParallel({self.size}): {self.size} does not divide the {ranks} ranks that experts live on ({written})."
            problems.append(Problem(what, degrees.capitalize()))
        for count in counts:
            if count % self.size:
                named = ", ".join(dict.fromkeys(generic(each.name) for each in found or () if each.count == count))
                what = f"ExpertParallel({self.size}): {self.size} does not divide the {count} experts of {named}."
                problems.append(Problem(what, f"Of the {ranks} ranks that experts live on, {degrees}"))
        return problems

    def has_work(self, module: nn.Module) -> bool:
        """Whether a module has anything for it: experts, or what counts their tokens."""
        from lightning_5d.expert_parallel.counted import counting_modules
        from lightning_5d.expert_parallel.survey import found_experts

        return bool(found_experts(module)) or any(True for _ in counting_modules(module))

    @override
    def surveyed(self, module: nn.Module, plan: ParallelPlan) -> Parallelism:
        from lightning_5d.expert_parallel.survey import first_names, found_experts

        settings = {setting.name: getattr(self, setting.name) for setting in dataclasses.fields(self)}
        found = found_experts(module)
        # Only how they look: what a pipeline takes away from a rank must not stay in its memory for the sake of a name.
        layers = tuple(each.without_values() for each in found)
        return _Surveyed(
            **settings, layers=layers, first_names=first_names(module, found), is_at_work=self.has_work(module)
        )

    def parallelize(self, module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, dtypes: Dtypes) -> Parallelized:
        """Leaves on this rank its own experts."""
        return self.surveyed(module, plan).parallelize(module, plan, mesh, dtypes)


@dataclass(frozen=True)
class _Surveyed(ExpertParallel):
    """The plugin that has seen the whole module, before a pipeline has taken parts of it away.

    Attributes:
        layers: Its experts, without their weights' values.
        first_names: The names in `layers` of those that have several, by each of their names.
        is_at_work: Whether there is anything to do.
    """

    layers: tuple[FoundExperts, ...] = dataclasses.field(kw_only=True)
    first_names: Mapping[str, str] = dataclasses.field(kw_only=True)
    is_at_work: bool = dataclasses.field(kw_only=True)

    @override
    def parallelize(self, module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, dtypes: Dtypes) -> Parallelized:
        from lightning_5d.expert_parallel.spread_experts import SpreadExperts

        if not self.is_at_work:
            return Parallelized()
        return SpreadExperts(module, self, mesh, self.layers, self.first_names)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _listed(sizes: Sequence[int]) -> str:
    *most, last = map(str, sizes)
    return f"{', '.join(most)} or {last}" if most else last

"""The tensor axis: `TensorParallel`, what it cuts, and with it the sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import nn
from typing_extensions import override

from lightning_5d.parallelism import Dtypes, Parallelism, Parallelized, Problem, RunContext, Size

if TYPE_CHECKING:
    from lightning_5d.mesh import ParallelMesh
    from lightning_5d.plan import ParallelPlan
    from lightning_5d.tensor_parallel.layout import TensorLayout


@dataclass(frozen=True)
class TensorParallel(Parallelism):
    """Cuts layers over ranks that compute one batch together: attention by heads, feed-forward layers by features, the vocabulary.

    Which layers are cut a plan says: the model's own (`ParallelPlan.tensor`, or a Hugging Face model's ``base_model_tp_plan`` and
    ``_tp_plan``), or `plan`. The model itself stays as it is, and so does the loss: ``F.cross_entropy`` works on logits of which
    each rank has its part of the vocabulary. Per block and step four all-reduces of the activations (batch x tokens x hidden) travel,
    two in forward and two in backward; with `sequence_parallel` as many bytes, in pairs of gathers and scatters.

    Args:
        size: Ranks of the axis; divides the query heads. Where it exceeds the key and value heads, several ranks hold the same ones.
        sequence_parallel: Norms, dropout and residuals compute on a part of the sequence each, so that activations outside of attention and
            feed-forward layers take ``1 / size`` of the memory.
        plan: Styles of modules, ``{"model.layers.*.mlp.up_proj": "colwise", ...}``, in place of the model's own.

    Source: Shoeybi et al., "Megatron-LM" (2019), section 3; Korthikanti et al., "Reducing Activation Recomputation in Large
    Transformer Models" (2022), section 4.2.2, for the sequence.
    """

    axis: ClassVar[str] = "tensor"
    order: ClassVar[int] = 20

    size: int
    sequence_parallel: bool = False
    plan: Mapping[str, str] | None = None

    def mesh_sizes(self) -> dict[str, Size]:
        """The size of ``tp``."""
        return {"tp": self.size}

    def validate(self, context: RunContext) -> list[Problem]:
        """Checks the size, and where the module is known what the plan makes of it."""
        problems = []
        if not _is_count(self.size):
            what = f"TensorParallel(size={self.size!r}) is not a whole number of at least 1."
            problems.append(Problem(what, "Use 1 or more."))
        if not isinstance(self.sequence_parallel, bool):
            what = f"TensorParallel(sequence_parallel={self.sequence_parallel!r}) is neither True nor False."
            problems.append(Problem(what, "Use True to cut the sequence, too."))
        elif self.sequence_parallel and self.size == 1:
            what = "TensorParallel(1, sequence_parallel=True): the sequence is cut over the ranks of the tensor axis, and that has one."
            problems.append(Problem(what, "Use a size of at least 2, or leave sequence_parallel out."))
        if self.plan is not None and not (
            isinstance(self.plan, Mapping) and all(isinstance(pattern, str) for pattern in self.plan)
        ):
            what = f"TensorParallel(plan={self.plan!r}) is no mapping of patterns, which are text, to styles."
            problems.append(Problem(what, "Write {'layers.*.mlp.up': 'colwise', 'layers.*.mlp.down': 'rowwise'}."))
        if self.plan is not None and context.plan is not None and context.plan.tensor:
            what = "The styles of the tensor axis are given twice, by FiveD(plan=ParallelPlan(tensor=...)) and by TensorParallel(plan=...)."
            problems.append(Problem(what, "Keep one of them."))
        if problems or context.module is None or self.size == 1:
            return problems
        from lightning_5d.plan import find_plan

        _, problems = self._layout(context.module, find_plan(context.module, context.plan))
        return problems

    @override
    def surveyed(self, module: nn.Module, plan: ParallelPlan) -> Parallelism:
        if self.size == 1:
            return self
        layout, _ = self._layout(module, plan)
        settings = {setting.name: getattr(self, setting.name) for setting in dataclasses.fields(self)}
        return _Surveyed(**settings, layout=layout)

    def parallelize(self, module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, dtypes: Dtypes) -> Parallelized:
        """Leaves on this rank its part of the weights that are cut."""
        if self.size == 1:
            return Parallelized()
        surveyed = self.surveyed(module, plan)
        return surveyed.parallelize(module, plan, mesh, dtypes)

    def _layout(self, module: nn.Module, plan: ParallelPlan) -> tuple[TensorLayout, list[Problem]]:
        from lightning_5d.expert_parallel.rows import region_problems
        from lightning_5d.expert_parallel.survey import found_experts
        from lightning_5d.tensor_parallel.plan import layout_of
        from lightning_5d.tensor_parallel.sequence_mixing import mixing_problems

        if self.plan is not None:
            plan = dataclasses.replace(plan, tensor=self.plan, tensor_source="TensorParallel(plan=...)")
        layout, problems = layout_of(module, plan, self.size, self.sequence_parallel)
        experts = [found.name for found in found_experts(module)]
        return layout, [*problems, *mixing_problems(module, layout), *region_problems(experts, layout)]


@dataclass(frozen=True)
class _Surveyed(TensorParallel):
    """The plugin that has seen the whole module, before a pipeline has taken parts of it away."""

    layout: TensorLayout = dataclasses.field(kw_only=True)

    @override
    def parallelize(self, module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, dtypes: Dtypes) -> Parallelized:
        from lightning_5d.tensor_parallel.sharded import ShardedLayers

        return ShardedLayers(
            module, self.layout, mesh, sequence_parallel=self.sequence_parallel, compute=dtypes.compute
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1

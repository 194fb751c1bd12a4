"""The pipeline axis: `PipelineParallel`, its schedule and its cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import lightning.pytorch as pl
from torch import nn

from lightning_5d.parallelism import Dtypes, Parallelism, Parallelized, Problem, RunContext, Size
from lightning_5d.pipeline_parallel.schedule import Schedule
from lightning_5d.pipeline_parallel.schedules import SCHEDULES, make_schedule

if TYPE_CHECKING:
    from lightning_5d.mesh import ParallelMesh
    from lightning_5d.pipeline_parallel.microbatches import Splitter
    from lightning_5d.pipeline_parallel.stage import StageCosts
    from lightning_5d.plan import ParallelPlan

Split = Literal["even", "blocks"] | Sequence[int]


@dataclass(frozen=True)
class PipelineParallel(Parallelism):
    """Cuts the blocks of a module into stages on different ranks, and runs every step as a schedule of microbatches.

    `training_step` stays as it is: each microbatch, a piece of the batch along its first dimension, goes through it on every
    stage, which stops where the next one takes over. What the last stage returns and logs is known on all ranks.

    Args:
        size: Ranks of the pipeline.
        schedule: A name from `SCHEDULES` (``fived schedule --help`` lists them), or the path of a table, ``something.csv``.
        microbatches: Pieces of a batch. A batch with fewer rows has as many as it has rows.
        chunks: Stages per rank, for ``interleaved_1f1b`` and ``looped_bfs``.
        group_size: Microbatches that go through a rank's stages together, for ``interleaved_1f1b``.
        split: Where stages end: ``"even"`` for the shortest step by estimated work and this schedule, ``"blocks"`` for equal numbers of
            blocks, or the number of blocks of each stage, 0 included.
        costs: What blocks cost, as `measure_costs` gives it, for ``split="even"``; estimated from the sizes of weights if ``None``.
        split_batch: Cuts a batch into at most so many smaller ones, for batches whose rows are not simply their first dimension; a
            method ``split_batch(batch, count)`` of the LightningModule does the same.
        dynamic: Shapes between stages may depend on values in the batch: costs a message per microbatch.
        post_validation: Optimizer steps do not wait for the gradients of other stages. They are made as if nothing had to be
            clipped or left out, and made again where that was wrong, which is known before the next backward: the results
            are those of steps that wait. For schedules that split the backward; costs the memory of this rank's weights,
            optimizer states and gradients once more. See `docs/post_validation.md`.

    Source: Huang et al., "GPipe" (2019), for the cut into microbatches; `docs/pipeline_schedules.md` names that of each schedule.
    """

    axis: ClassVar[str] = "pipeline"
    order: ClassVar[int] = 10

    size: int
    schedule: str = "1f1b"
    microbatches: int = 8
    chunks: int | None = None
    group_size: int | None = None
    split: Split = "even"
    costs: StageCosts | None = None
    split_batch: Splitter | None = None
    dynamic: bool = False
    post_validation: bool = False

    def mesh_sizes(self) -> dict[str, Size]:
        """The size of ``pp``."""
        return {"pp": self.size}

    def make_schedule(self) -> Schedule:
        """The schedule of a training step.

        Raises:
            ValueError: If there is none of this name, or sizes and options do not fit it.
        """
        return make_schedule(
            self.schedule, self.size, self.microbatches, chunks=self.chunks, group_size=self.group_size
        )

    def validate(self, context: RunContext) -> list[Problem]:
        """Checks sizes and schedule, and where the module is known whether and where it can be cut."""
        problems = [
            Problem(f"PipelineParallel({name}={value!r}) is not a whole number of at least 1.", "Use 1 or more.")
            for name, value in (
                ("size", self.size),
                ("microbatches", self.microbatches),
                ("chunks", self.chunks),
                ("group_size", self.group_size),
            )
            if value is not None and not _is_count(value)
        ]
        if self.costs is not None and self.split != "even":
            what = f"costs say where stages end, and so does split={self.split!r}."
            problems.append(Problem(what, "Leave one of them out."))
        if problems:
            return problems
        from lightning_5d.pipeline_parallel.stage.problems import split_problems

        try:
            schedule = self.make_schedule()
        except (ValueError, OSError) as error:
            what, _, fix = str(error).rstrip(".").partition("; ")
            said = f"{what};" if fix else f"{what}."
            return [Problem(f"PipelineParallel: {said}", f"{fix}." if fix else "See `fived schedule --help`.")]
        if self.post_validation and (not schedule.splits_backward or len(schedule.placement) > 1):
            return [_not_post_validated(schedule)]
        if context.module is None:
            return split_problems(self._blocks_meant(schedule.stages), schedule.stages, self.split)
        from lightning_5d.pipeline_parallel.compatibility import callback_problems
        from lightning_5d.pipeline_parallel.stage import layout_problems
        from lightning_5d.plan import find_plan

        plan = find_plan(context.module, context.plan)
        return [
            *layout_problems(context.module, plan, schedule.stages, self.split, self.costs),
            *(callback_problems(context.module) if self.size > 1 else []),
        ]

    def _blocks_meant(self, stages: int) -> int:
        """How many blocks a module has to have for this split: what can be wrong with it before there is a module."""
        if isinstance(self.split, str) or not all(isinstance(size, int) and size >= 0 for size in self.split):
            return stages
        return sum(self.split)

    def parallelize(self, module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, dtypes: Dtypes) -> Parallelized:
        """Leaves on this rank the weights of its stages."""
        from lightning_5d.checkpoint.stages import Stages
        from lightning_5d.pipeline_parallel.compatibility import warn_of_differences
        from lightning_5d.pipeline_parallel.pipelined import Pipelined
        from lightning_5d.pipeline_parallel.stage import Cut, layout_of

        if not isinstance(module, pl.LightningModule):
            raise TypeError(f"A pipeline cuts a LightningModule, not a {type(module).__name__}.")
        schedule = self.make_schedule()
        if self.size > 1:
            warn_of_differences(module, self.microbatches)
        stages = Stages.of(module, mesh)
        split = self._shortest(module, plan, schedule) if self.split == "even" else self.split
        layout = layout_of(module, plan, schedule.stages, split)
        cut = Cut(module, layout, schedule.stages_of(mesh.rank("pp")))
        return Pipelined(
            module,
            cut,
            schedule,
            mesh,
            stages,
            self.split_batch,
            dynamic=self.dynamic,
            post_validation=self.post_validation,
        )

    def _shortest(self, module: nn.Module, plan: ParallelPlan, schedule: Schedule) -> Sequence[int]:
        from lightning_5d.pipeline_parallel.balance import shortest_split
        from lightning_5d.pipeline_parallel.stage import dissect, estimate_costs

        anatomy = dissect(module, plan)
        costs = self.costs or estimate_costs(module, anatomy)
        each = [costs.blocks[name] for name in anatomy.blocks]
        return shortest_split(schedule, each, costs.before, costs.after)


def _not_post_validated(schedule: Schedule) -> Problem:
    why = "computes each backward at once" if not schedule.splits_backward else "holds two copies of each weight"
    fitting = [
        name
        for name, family in SCHEDULES.items()
        if family.copies == 1 and family.chunks is not None and make_schedule(name, 2, 4).splits_backward
    ]
    return Problem(
        f"PipelineParallel(post_validation=True) is for zero-bubble schedules, and {schedule.name} {why}.",
        f"Use {', '.join(fitting[:-1])} or {fitting[-1]}, or leave post_validation out.",
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1

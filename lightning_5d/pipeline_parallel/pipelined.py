"""The pipeline axis at work: one call of the user's step becomes a schedule of microbatches over the stages."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten
from typing_extensions import override

from lightning_5d.checkpoint.stages import Stages
from lightning_5d.mesh import ParallelMesh
from lightning_5d.parallelism import Parallelized, Problem
from lightning_5d.pipeline_parallel.channels import Channels
from lightning_5d.pipeline_parallel.compatibility import split_optimizer_problems
from lightning_5d.pipeline_parallel.deferred_weights import DeferredWeights
from lightning_5d.pipeline_parallel.executor import Executor, StaleForwardsError, Work
from lightning_5d.pipeline_parallel.microbatches import Microbatch, Splitter, split_batch
from lightning_5d.pipeline_parallel.post_validation import OptimisticSteps, lines_of_verdicts
from lightning_5d.pipeline_parallel.program import Program, neighbours, program_of
from lightning_5d.pipeline_parallel.schedule import Schedule
from lightning_5d.pipeline_parallel.set_aside import SetAside
from lightning_5d.pipeline_parallel.shared_weights import SharedWeights
from lightning_5d.pipeline_parallel.sharing import SharedSteps
from lightning_5d.pipeline_parallel.snapshot import Snapshot
from lightning_5d.pipeline_parallel.stage import Cut
from lightning_5d.pipeline_parallel.trace import Recorder
from lightning_5d.pipeline_parallel.whole_gradients import WholeGradients
from lightning_5d.scheduling import PostValidation, Scheduling, StepRun

if TYPE_CHECKING:
    from lightning_5d.steps import ParallelSteps
    from lightning_5d.strategy import FiveD


class Pipelined(Scheduling):
    """A pipeline at work on one module.

    Args:
        module: The user's LightningModule, cut.
        cut: This rank's stages of it.
        schedule: The schedule of a training step.
        mesh: The ranks by axis.
        stages: The names of the whole module.
        split: The user's own way to cut a batch into microbatches; a module's ``split_batch`` method if ``None`` and if it has one.
        dynamic: Whether shapes between stages may differ for inputs of equal shapes.
        post_validation: Whether optimizer steps are made before gradients of all stages have been looked at.

    Attributes:
        schedule: The schedule of a training step.
        mesh: The ranks by axis.
        rank: This rank's place in the pipeline.
        cut: This rank's stages.
        shared_weights: Those of this rank that others hold as well.
        window_ends: Whether the gradients of the last training step are the last of an optimizer step.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        cut: Cut,
        schedule: Schedule,
        mesh: ParallelMesh,
        stages: Stages,
        split: Splitter | None = None,
        dynamic: bool = False,
        post_validation: bool = False,
    ) -> None:
        self.schedule, self.mesh, self.cut = schedule, mesh, cut
        self.rank = mesh.rank("pp")
        self._module, self._device, self._dynamic = module, mesh.device, dynamic
        self._split: Splitter | None = split or getattr(module, "split_batch", None)
        pairs = {*neighbours(schedule), *(lines_of_verdicts(schedule.ranks) if post_validation else ())}
        self._channels = Channels.open(mesh, self._device, mesh.timeout, pairs)
        self._parts = cut.parts
        own = [each for part in self._parts for each in part.modules]
        # Before activation checkpointing, which keeps the forward that it finds.
        self._deferred = DeferredWeights(own) if schedule.splits_backward else None
        self._others: list[Parallelized] = []
        self._executor: Executor | None = None
        self._shared = SharedSteps(module, mesh, self._device, mesh.timeout, own, not post_validation)
        self._stages = stages
        self.shared_weights = SharedWeights(module, stages.first_names, cut.owners, schedule.placement, mesh)
        self._programs: dict[tuple[int, bool], Program] = {}
        self._run: StepRun | None = None
        self.window_ends = False
        self._aside: SetAside | None = None
        self._weights: list[float | None] = []
        self._post_validation = post_validation

    @override
    def all_at_work(self, axes: Sequence[Parallelized]) -> None:
        self._others = [axis for axis in axes if axis is not self]
        self.cut.arm()
        self._executor = Executor(
            self.cut, self._channels, self._others, self._deferred, self._device, dynamic=self._dynamic
        )

    @property
    def executor(self) -> Executor:
        """Runs the schedule.

        Raises:
            RuntimeError: Before all axes are at work.
        """
        if self._executor is None:
            raise RuntimeError("The pipeline is not at work yet.")
        return self._executor

    @property
    def recorder(self) -> Recorder | None:
        """Is told what happens when, while it is set."""
        return self.executor.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self.executor.recorder = recorder

    @override
    def first_weights_agree(self) -> bool:
        return len(self.schedule.placement) == 1

    @override
    def begin_step(self, run: StepRun) -> None:
        if self._run is not None and run.epoch != self._run.epoch:
            self.executor.forget_shapes()  # a stage may have been frozen or unfrozen: who wants gradients is agreed anew
        self._run = run
        if run.backward:
            self.window_ends = run.last

    # [Note: gradients before their backward]
    # Lightning's closure is `training_step`, `zero_grad`, `backward`. Here the schedule runs inside of the first, so what it makes
    # is set aside before the second, whoever has overridden that, and comes back in the third.
    @override
    def call(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._run
        if run is None:
            raise RuntimeError("A pipeline has to be told about a step before it is called.")
        if not args:
            raise MisconfigurationException(
                "A pipeline splits the batch, which is a step's first positional argument; this step got none."
            )
        batch, *rest = args
        microbatches = self._microbatches(batch)
        rows = [microbatch.rows for microbatch in microbatches]
        work = [
            Work(
                (microbatch.batch, *rest),
                kwargs,
                self._signature(run.kind, index, microbatch.batch),
                partial(self._around, run, index, rows),
            )
            for index, microbatch in enumerate(microbatches)
        ]
        program = self._program(len(work), run.backward)
        aside = SetAside(list(self._module.parameters()), run.keep_gradients) if run.backward and run.first else None
        outputs = self._outputs(run, program, work, step, rows)
        if aside is not None:
            aside.swap()
        self._aside = aside
        merged = self._shared.finish(outputs, rows, program.last_stage_ranks, training=run.backward)
        self._weights = merged.weights
        return merged.output

    def _outputs(
        self, run: StepRun, program: Program, work: Sequence[Work], step: Callable[..., Any], rows: Sequence[int]
    ) -> dict[int, Any]:
        pending = run.pending if run.backward else None
        start, around = partial(self._start, run, rows), run.around_backward or _no_context
        run_all = self.executor.run
        if self._post_validation and run.backward:
            run_all = partial(run_all, tell=partial(self._shared.tell, rows=rows))
        if pending is not None:
            before = Snapshot.of_buffers(self._module)
            counts = [axis.taking_back() for axis in self._others]
            try:
                return self._execute(run, partial(run_all, confirm=pending.stands), program, work, step, start, around)
            except StaleForwardsError:
                before.restore()
                for take_back in counts:
                    take_back()
                self._shared.discard()
                pending.redo()
        return self._execute(run, run_all, program, work, step, start, around)

    def _execute(self, run: StepRun, execute: Callable[..., dict[int, Any]], *args: Any) -> dict[int, Any]:
        with ExitStack() as contexts:
            for axis in self._others:
                contexts.enter_context(axis.scheduled(self._parts, last=run.last, backward=run.backward))
            return execute(*args)

    @override
    def post_validation(self, strategy: FiveD) -> PostValidation | None:
        return OptimisticSteps(strategy, self._channels, self.mesh) if self._post_validation else None

    @override
    def training_context(self, strategy: ParallelSteps) -> AbstractContextManager[None]:
        if self.mesh.size("pp") == 1 or strategy.logs is None:
            return nullcontext()
        return WholeGradients(strategy, self, strategy.logs.host_group).in_place()

    @override
    def give_gradients(self) -> list[float | None]:
        if self._aside is not None:
            self._aside.put_back(self.shared_weights.owners_of)
            self._aside = None
        return self._weights

    @override
    def finalize_gradients(self) -> None:
        self.shared_weights.sum_gradients()

    @override
    def gradient_axes(self, parameter: Tensor) -> Sequence[str] | None:
        return self.shared_weights.gradient_axes(parameter)

    @override
    def holders_of(self, parameter: Tensor) -> dist.ProcessGroup | None:
        return self.shared_weights.group_of(parameter)

    @override
    def stages(self) -> Stages | None:
        return self._stages

    @override
    def optimizer_context(self) -> AbstractContextManager[None]:
        return self.cut.optimizer_context()

    @override
    def optimizer_problems(self, optimizers: Sequence[Optimizer]) -> list[Problem]:
        # By now weights have their first values, which may have been drawn on each rank for itself.
        self.shared_weights.synchronize()
        return [*self.shared_weights.settle_groups(optimizers), *split_optimizer_problems(optimizers)]

    @override
    def memory(self) -> Iterable[tuple[str, Tensor]]:
        for tensor in self._channels.memory():
            yield "communication buffers", tensor
        for tensor in self._channels.mapped():
            yield "memory of other ranks", tensor

    @override
    def close(self) -> None:
        if self._deferred is not None:
            self._deferred.close()
        self._channels.close()
        self._shared.close()

    def _microbatches(self, batch: Any) -> list[Microbatch]:
        found = split_batch(batch, self.schedule.microbatches, self._split)
        count = len(found)
        for axis in self._others:
            count = min(count, axis.microbatches(count))
        if count < len(found):
            found = split_batch(batch, count, self._split)
            if len(found) != count:
                raise MisconfigurationException(
                    f"split_batch returned {len(found)} microbatches where {count} were asked for, as many as the batch of another data rank"
                    " has: ranks that send each other tokens need the same number. Return as many as are asked for, or give all data ranks"
                    " batches of as many rows."
                )
        return found

    def _program(self, microbatches: int, backward: bool) -> Program:
        key = microbatches, backward
        if key not in self._programs:
            self._programs[key] = program_of(self.schedule, self.rank, microbatches, backward)
        return self._programs[key]

    @contextmanager
    def _around(self, run: StepRun, microbatch: int, rows: Sequence[int], stage: int) -> Generator[None, None, None]:
        if run.reseed is not None:
            run.reseed(f"{stage}/{microbatch}")
        with self._shared.microbatch(microbatch, rows, last=stage + 1 == self.schedule.stages):
            yield

    def _start(self, run: StepRun, rows: Sequence[int], microbatch: int, output: Any) -> tuple[Tensor, Tensor] | None:
        if run.start is None:
            return None
        return run.start(output, rows[microbatch] / sum(rows))

    def _signature(self, kind: str, index: int, batch: Any) -> Hashable:
        if isinstance(batch, Tensor):
            seen: Hashable = (batch.shape, batch.dtype)
        else:
            leaves, tree = tree_flatten(batch)
            seen = tree, tuple((x.shape, x.dtype) if isinstance(x, Tensor) else type(x) for x in leaves)
        return kind, seen, index if self._dynamic else None


@contextmanager
def _no_context() -> Generator[None, None, None]:
    yield

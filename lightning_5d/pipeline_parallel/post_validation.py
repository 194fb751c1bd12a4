"""Optimizer steps that do not wait for the gradients of all stages, and are made again where that was wrong.

Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 4.2.
"""

# [Note: post-validation]
# Clipping needs the norm of all gradients, and loss scaling has to know whether all are finite. A reduction over all stages
# before the step has every rank wait for the last one, which undoes what a zero-bubble schedule has won. Here a rank takes what
# the ranks before it in the pipeline have found, adds its own, passes it on and steps on what it knows, which is usually right.
# The last one knows all and tells everyone: directly, as in a V-shaped schedule the first rank is the first to ask. Everyone reads
# the verdict before the next step's first backward. If it is bad, all put back weights, optimizer states and gradients, step
# with the right norm, and start the schedule again.
#
# Bits are those of a synchronous step: factors of 1.0 leave gradients as they are, and the sum over stages is taken in the
# order of the pipeline in both (`lightning_5d.gradients.power_of_stage`).

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from typing_extensions import override

from lightning_5d.gradients import clip_by_norm, clip_factor, power_of_stage
from lightning_5d.pipeline_parallel.snapshot import GradientSnapshot, OptimizerSnapshot, Pool, Snapshot
from lightning_5d.pipeline_parallel.termination import late_termination
from lightning_5d.scheduling import PendingStep, PostValidation, StepHook
from lightning_5d.skipped_steps import LOSS_SCALE

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_5d.mesh import ParallelMesh
    from lightning_5d.pipeline_parallel.channels import Arriving, Channels
    from lightning_5d.strategy import FiveD

_OF_MODULE = (
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "on_before_zero_grad",
)
_OF_CALLBACKS = ("on_before_optimizer_step", "on_before_zero_grad")
_PART, _VERDICT = (2,), (3,)


@dataclass
class _Kept:
    """What is needed to take a step back.

    Attributes:
        weights: Weights and optimizer states before it.
        gradients: Gradients before clipping.
        groups: Hyperparameters of the optimizer before it.
        groups_after: And after it.
        counts: Of `skipped_steps`, before it.
        scale: Of the loss scaler, before it.
        schedules: Step-wise learning-rate schedules before they advance.
        buffers: What step hooks of the optimizer change, before it.
    """

    weights: OptimizerSnapshot
    gradients: GradientSnapshot
    buffers: Snapshot
    groups: list[dict[str, Any]]
    groups_after: list[dict[str, Any]]
    counts: dict[str, Any]
    scale: dict[str, Any] | None
    schedules: list[tuple[Any, dict[str, Any]]]


class _Step(PendingStep):
    """One optimistic step.

    Attributes:
        known: What the ranks up to this one know: the squared norm, and how many have seen an overflow.
        verdict: The same of all ranks, and whether the step has to be made again; on the last rank a tensor.
    """

    def __init__(
        self,
        steps: OptimisticSteps,
        optimizer: Any,
        bound: float | None,
        known: Tensor,
        verdict: Tensor | Arriving,
        kept: _Kept | None,
    ) -> None:
        self._steps, self.optimizer, self.bound, self.known = steps, optimizer, bound, known
        self._verdict, self.kept = verdict, kept
        # A step that is made again runs inside of a user's step, which may have another one.
        self.default_dtype = torch.get_default_dtype()
        self._read: tuple[float, Tensor] | None = None

    def read(self) -> tuple[float, Tensor, bool]:
        """Overflows, norm and whether to make the step again."""
        verdict = self._verdict if isinstance(self._verdict, Tensor) else self._verdict.wait()[0]
        self._verdict = verdict
        _, overflows, bad = verdict.tolist()
        return overflows, verdict[0].pow(0.5), bool(bad)

    @override
    def stands(self) -> bool:
        if self.read()[2]:
            return False
        self._steps.forget(self)
        return True

    @override
    def redo(self) -> None:
        self._steps.redo(self, inside=True)


class OptimisticSteps(PostValidation):
    """Post-validation on one rank.

    Args:
        strategy: Whose steps they are.
        channels: Messages between the ranks of the pipeline.
        mesh: The ranks by axis.
    """

    def __init__(self, strategy: FiveD, channels: Channels, mesh: ParallelMesh) -> None:
        self._strategy, self._channels, self._mesh = strategy, channels, mesh
        self._rank, self._size = mesh.rank("pp"), mesh.size("pp")
        self._alone = True
        self._pool = Pool()
        self._optimizer: Any = None
        self._step: _Step | None = None
        self._pending: _Step | None = None
        self.steps_redone = 0

    @override
    def train(self, trainer: pl.Trainer, host_group: dist.ProcessGroup) -> AbstractContextManager[None]:
        self._alone = not _others_look(trainer)
        return late_termination(trainer, host_group)

    @override
    def begin(self, optimizer: Any) -> None:
        self._step, self._optimizer = None, optimizer
        trainer = self._strategy.connected_module.trainer
        self.optimistic = (
            self._size > 1
            and self._alone
            and all(callable(getattr(hook, "changed", None)) for hook in _step_hooks(optimizer))
            and self._has_something_to_find()
            and not _ends_here(trainer)
        )

    def _has_something_to_find(self) -> bool:
        trainer = self._strategy.connected_module.trainer
        clips = trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm != "value"
        return clips or self._scaler is not None

    @property
    def _scaler(self) -> Any:
        return self._strategy.precision_plugin.scaler

    # The step

    @override
    def overflow(self, found: bool) -> bool:
        group = self._mesh.stage_group
        if group is None:
            return found
        flag = torch.tensor(int(found), device=self._mesh.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return bool(flag)

    @override
    def norm(self, parameters: Sequence[Tensor], bound: float) -> Tensor:
        if self._step is not None:
            raise MisconfigurationException(
                f"{type(self._optimizer).__name__} runs several backwards in a step, and post-validation looks at gradients once. Leave"
                " PipelineParallel(post_validation=True) out."
            )
        power = power_of_stage(parameters, self._mesh, self._strategy.gradient_axes)
        return self._exchange(power, bound).known[0].pow(0.5)

    @override
    def before_step(self) -> None:
        if self._step is None:  # nothing is clipped by norm, or gradients here are not finite
            self._exchange(torch.full((), math.nan, dtype=_wide(self._mesh.device), device=self._mesh.device), None)

    def _exchange(self, power: Tensor, bound: float | None) -> _Step:
        """Takes what ranks before this one have found, and passes it on with this rank's own."""
        last = self._rank == self._size - 1
        kept = None if last else self._keep()
        known = torch.stack([power, torch.full_like(power, float(self._strategy.overflow))])
        if self._rank:
            known = self._channels.receive([(_PART, known.dtype)], self._rank - 1).wait()[0] + known
        verdict: Tensor | Arriving
        if last:
            bad = known[1:] > 0
            if bound is not None:
                bad = bad | (clip_factor(bound, known[:1].pow(0.5)) != 1.0)
            verdict = torch.cat([known, bad.to(known.dtype)])
            for rank in reversed(range(self._size - 1)):
                self._channels.send([verdict], rank)
        else:
            self._channels.send([known], self._rank + 1)
            # Expected now: it has to come before anything that the last rank sends in its next step.
            verdict = self._channels.receive([(_VERDICT, known.dtype)], self._size - 1)
        if self._scaler is not None and float(known[1]):
            self._strategy.leave_out_overflow()
        self._step = _Step(self, self._optimizer, bound, known, verdict, kept)
        return self._step

    def _keep(self) -> _Kept:
        optimizer, scaler = self._optimizer, self._scaler
        return _Kept(
            OptimizerSnapshot(optimizer, self._pool),
            GradientSnapshot(_parameters(optimizer), self._pool),
            Snapshot([each._buffers for hook in _step_hooks(optimizer) for each in hook.changed()], pool=self._pool),
            _groups(optimizer),
            [],
            self._strategy.skipped_steps.state_dict(),
            None if scaler is None else scaler.state_dict(),
            [],
        )

    @override
    def after_step(self) -> None:
        step, self._step = self._step, None
        self.optimistic = False
        if step is None:
            return
        self._pending = step
        if step.kept is not None:
            step.kept.groups_after = _groups(step.optimizer)
            if self._scaler is not None:
                step.kept.schedules = [
                    (config.scheduler, deepcopy(config.scheduler.state_dict()))
                    for config in self._strategy.lr_scheduler_configs
                    if config.interval == "step"
                ]

    # The verdict

    @property
    @override
    def pending(self) -> PendingStep | None:
        return self._pending

    @override
    def settle(self) -> None:
        step = self._pending
        if step is not None and not step.stands():
            self.redo(step, inside=False)

    @override
    def drop(self) -> None:
        self._pending = self._step = None

    def forget(self, step: _Step) -> None:
        """Ends a step that is final."""
        self._pending = None
        if step.kept is not None:
            step.kept.weights.free()
            step.kept.gradients.free()
            step.kept.buffers.free()
            step.kept = None

    def redo(self, step: _Step, *, inside: bool) -> None:
        """Puts everything back to where it was before a step, and makes it as the verdict says.

        Args:
            step: The step.
            inside: Whether the next step has begun.
        """
        overflows, norm, _ = step.read()
        self.steps_redone += 1
        if step.kept is not None:
            with ExitStack() as contexts:
                contexts.enter_context(torch.inference_mode(False))
                contexts.enter_context(torch.enable_grad())
                self._redo(step, step.kept, norm, overflow=overflows > 0)
        if overflows and not inside:
            self._strategy.leave_out_overflow()
        self.forget(step)

    def _redo(self, step: _Step, kept: _Kept, norm: Tensor, *, overflow: bool) -> None:
        strategy, optimizer, scaler = self._strategy, step.optimizer, self._scaler
        now = _groups(optimizer)
        kept.weights.restore()
        kept.buffers.restore()
        _set_groups(optimizer, kept.groups)
        strategy.skipped_steps.load_state_dict(kept.counts)
        cleared = kept.gradients.restore()
        if scaler is not None and kept.scale is not None:
            scaler.take_back(kept.scale)
        if overflow:
            for schedule, state in kept.schedules:
                schedule.load_state_dict(state)
        else:
            if scaler is None:
                strategy.precision_plugin.nonfinite.look_at(norm)
            if step.bound is not None:
                clip_by_norm(_parameters(optimizer), step.bound, norm)
            strategy.step_again(optimizer, step.default_dtype)
            _set_groups(optimizer, _changes(kept.groups_after, now))
        for parameter in cleared:
            parameter.grad = None
        strategy.count_step(optimizer, LOSS_SCALE if overflow else None)


def lines_of_verdicts(ranks: int) -> list[tuple[int, int]]:
    """Pairs of ranks of a pipeline that send each other messages for it."""
    return [pair for rank in range(ranks - 1) for pair in ((rank, rank + 1), (rank, ranks - 1))]


def _others_look(trainer: pl.Trainer) -> bool:
    """Whether somebody's hook sees gradients or weights at the step itself, and may want to see the right ones."""
    module = trainer.lightning_module
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return (
        not module.automatic_optimization
        or any(is_overridden(name, module) or name in vars(module) for name in _OF_MODULE)
        or any(isinstance(callback, WeightAveraging) for callback in callbacks)
        or any(
            is_overridden(name, callback)
            for callback in callbacks
            for name in _OF_CALLBACKS
            if not getattr(callback, "leaves_gradients_alone", False)
        )
    )


def _ends_here(trainer: pl.Trainer) -> bool:
    """Whether something else than another batch follows, as far as all ranks know: the epoch's end, or an evaluation."""
    loop = trainer.fit_loop.epoch_loop
    # Checked with lightning 2.6.6: how its loop decides.
    if loop._num_ready_batches_reached() or trainer.max_steps == trainer.global_step + 1:
        return True
    every = trainer.val_check_batch
    if not trainer.enable_validation or every is None or math.isinf(every):
        return False
    batch = loop.total_batch_idx if trainer.check_val_every_n_epoch is None else loop.batch_idx
    return (batch + 1) % int(every) == 0


def _step_hooks(optimizer: Any) -> list[StepHook]:
    # Private names checked with torch 2.13. Those of other people may change anything, so nothing is taken back under them.
    before, after = (getattr(optimizer, f"_optimizer_step_{when}_hooks", None) or {} for when in ("pre", "post"))
    return [*before.values(), *after.values()]


def _parameters(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


@torch.no_grad()
def _set_groups(optimizer: Any, groups: Sequence[dict[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        for key, value in values.items():
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                group[key].copy_(value)
            else:
                group[key] = value


def _changes(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What schedules and hooks have changed between two times."""
    return [
        {key: value for key, value in new.items() if key not in old or not _equal(old[key], value)}
        for old, new in zip(before, after, strict=True)
    ]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64

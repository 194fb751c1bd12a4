"""What happens in a step: the hooks of all axes around the user's own methods, in a fixed order."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_5d.batches import check_same_batch, leave_out_seen
from lightning_5d.checkpoint.lightning_state import WholeCheckpoints, unwrapped
from lightning_5d.communication import MeshCommunication
from lightning_5d.finetuning import whole_weights_compared
from lightning_5d.gradients import global_norms, scale_gradients
from lightning_5d.logs import LogExchange
from lightning_5d.loss import LossWindow, check_returned, weight_of, zero_like_loss
from lightning_5d.own_backwards import OwnBackwards
from lightning_5d.parallelism import Parallelized
from lightning_5d.precision import FiveDPrecision, around_backward
from lightning_5d.random_streams import step_stream
from lightning_5d.recompute_contexts import RecomputeContexts
from lightning_5d.scheduling import PostValidation, Scheduling, StepRun, looks_at_gradients
from lightning_5d.skipped_steps import LOSS_SCALE, SkippedSteps, holding_schedules

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_5d.loss_scaling import LossScaler


class ParallelSteps(WholeCheckpoints, MeshCommunication, ABC):
    """A Lightning strategy whose steps run under any number of axes.

    Attributes:
        parallelized: The axes at work on the connected module, outermost first; empty until it has been set up.
        logs: How ranks agree on what they log; ``None`` for one rank.
        skipped_steps: Counts of optimizer steps tried and left out.
        uneven_prediction: Whether ranks have different numbers of batches to predict, so that none may wait for another there.
        overflow: Whether loss scaling found this step's gradients not finite on any rank; until the next window.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parallelized: list[Parallelized] = []
        self.skipped_steps = SkippedSteps()
        self.overflow = False
        self._skip_reason: str | None = None
        self._stepping = False
        self._summed_up = False
        self._accumulating = False
        self._window = LossWindow()
        self._weight: float | None = None
        self._agreed: tuple[str, int] | None = None
        self.uneven_prediction = False
        self._shared_norm: tuple[Any, Tensor] | None = None
        self._evaluation = ExitStack()
        self.logs: LogExchange | None = None
        self._schedules = ExitStack()
        self._own_backwards = OwnBackwards(self)
        self._post: PostValidation | None = None

    @override
    def on_train_start(self) -> None:
        if self._post is not None and self.logs is not None:
            self._schedules.enter_context(self._post.train(self.connected_module.trainer, self.logs.host_group))
        for applied in self.parallelized:
            self._schedules.enter_context(applied.training_context(self))
        self._schedules.enter_context(whole_weights_compared())
        leave_out_seen(self.connected_module.trainer)
        self._schedules.enter_context(holding_schedules(self))

    @override
    def on_train_end(self) -> None:
        self._schedules.close()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._check_agreement(batch, "training")

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.connected_module
        self._weight = None
        trainer = module.trainer
        if module.automatic_optimization and trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            # Where Lightning clears gradients; an `optimizer_step` of the user's may have left the last ones unused.
            self._window.restart()
            self.overflow, self._skip_reason = False, None
        scheduling = self._scheduling
        if scheduling is None:
            for applied in self.parallelized:
                applied.begin_microbatch(last=not self._accumulating)

        def step(*args: Any, **kwargs: Any) -> Any:
            output: Any = module.training_step(*args, **kwargs)
            if module.automatic_optimization:
                check_returned(output, self.global_rank, self.world_size)
            self._weight = weight_of(output)
            if self._weight == 0.0:
                owed = [start for applied in self.parallelized for start in applied.owed()]
                output = {**output, "loss": zero_like_loss(output["loss"], owed)}
            return output

        output = self._run(step, self.precision_plugin.train_step_context(), args, kwargs, backward=True)
        if self.logs is not None:
            self.logs.step_begins()
            if not module.automatic_optimization:
                self.logs.step_ends()
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._check_agreement(args[0], "validation", *args[1:3])
        return self._run(self.connected_module.validation_step, self.precision_plugin.val_step_context(), args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._check_agreement(args[0], "test", *args[1:3])
        return self._run(self.connected_module.test_step, self.precision_plugin.test_step_context(), args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._check_agreement(args[0], "prediction", *args[1:3])
        return self._run(self.connected_module.predict_step, self.precision_plugin.predict_step_context(), args, kwargs)

    def _run(
        self,
        step: Callable[..., Any],
        precision: AbstractContextManager[None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        backward: bool = False,
    ) -> Any:
        """One call of a user's step, inside the contexts and calls of all axes (the first plugin outermost)."""
        with ExitStack() as contexts:
            contexts.enter_context(precision)
            trainer = self.connected_module.trainer
            reseed = contexts.enter_context(step_stream(trainer, self.mesh, self.root_device, args[1:]))
            if self._scheduling is not None:
                self._scheduling.begin_step(self._step_run(backward, reseed))
            for applied in self.parallelized:
                contexts.enter_context(applied.step_context())
            contexts.enter_context(RecomputeContexts(self.parallelized).of_others())
            batch, *rest = args or (None,)
            for applied in self.parallelized:
                batch = applied.shard_batch(batch)
            call = contexts.enter_context(self._own_backwards.around(step))
            for applied in reversed(self.parallelized):
                call = partial(_called_by, applied, call)
            return call(*((batch, *rest) if args else ()), **kwargs)

    @property
    def _scheduling(self) -> Scheduling | None:
        """The axis that runs steps by a schedule of its own, if there is one."""
        return next((applied for applied in self.parallelized if isinstance(applied, Scheduling)), None)

    def _step_run(self, backward: bool, reseed: Callable[[str], None]) -> StepRun:
        module = self.connected_module
        trainer = module.trainer
        kind = trainer.state.stage.value if trainer.state.stage else ""
        if not backward:
            return StepRun(kind, trainer.current_epoch, reseed=reseed)
        return StepRun(
            kind,
            trainer.current_epoch,
            backward=True,
            first=trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0,
            last=not self._accumulating,
            keep_gradients=looks_at_gradients(trainer),
            start=self._start,
            around_backward=around_backward(self.precision_plugin),
            reseed=reseed,
            pending=None if self._post is None else self._post.pending,
        )

    def _start(self, output: Any, share: float) -> tuple[Tensor, Tensor]:
        """Where the backward of a microbatch starts that a schedule runs."""
        loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
        if self._weight is not None:
            agree = self._scheduling is not None and self._scheduling.first_weights_agree()
            share = self._window.provisional(self._weight, self.mesh.data_group, self.root_device, agree=agree)
        factor = share / self.connected_module.trainer.accumulate_grad_batches
        if self._scaler is not None:
            factor *= self._scaler.scale
        if not loss.requires_grad:
            raise MisconfigurationException(
                f"training_step returned a loss on rank {self.global_rank} that depends on no trained weight and on nothing that"
                " an earlier stage has computed, so there is no backward."
            )
        # In half precision the factor, or the gradient it makes, could overflow.
        wide = loss if loss.dtype in (torch.float32, torch.float64) else loss.float()
        return wide, torch.full_like(wide, factor)

    def note_own_backward(self) -> None:
        """Comes after a backward of the user's own that has added to gradients of weights."""
        self._summed_up = False
        self._window.note_own_backward()

    def _check_agreement(self, batch: Any, what: str, *indices: Any) -> None:
        """On the first batch of an epoch, ranks that must hold the same batch compare theirs."""
        if self.mesh.replica_group is None:
            return
        if what == "training":
            epoch = self.connected_module.trainer.current_epoch
            if self._agreed == (what, epoch):
                return
            self._agreed = (what, epoch)
        elif indices and indices[0] != 0:
            return
        check_same_batch(batch, self.mesh, self.root_device, f"the first {what} batch")

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module, precision = self.connected_module, self.precision_plugin
        self.pre_backward(closure_loss)
        loss = precision.pre_backward(closure_loss, module)
        if self._scheduling is not None:
            return self._end_of_schedule(self._scheduling, closure_loss)
        if module.automatic_optimization:
            factor = self._window.scale(self._weight, self.mesh.data_group, self.root_device)
            loss = loss if factor == 1.0 else loss * factor
        self._summed_up = False
        # Inside out: what a data rank adds up is a summand of another axis's sum.
        for applied in reversed(self.parallelized):
            loss = applied.before_backward(loss)
        with self._own_backwards.announced():
            precision.backward(loss, module, optimizer, *args, **kwargs)
        for applied in reversed(self.parallelized):
            applied.after_backward()
        if module.automatic_optimization and self.logs is not None:
            self.logs.step_ends()
        closure_loss = precision.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def _end_of_schedule(self, scheduling: Scheduling, closure_loss: Tensor) -> Tensor:
        """Backward, of a step whose schedule has run it already."""
        weights = scheduling.give_gradients()
        agree = scheduling.first_weights_agree()
        self._window.add_batch(weights, self.mesh.data_group, self.root_device, agree=agree)
        self._summed_up = False
        if self.logs is not None:
            self.logs.step_ends()
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.connected_module)
        self.post_backward(closure_loss)
        return closure_loss

    def finalize_gradients(self, optimizer: Any) -> None:
        """Makes gradients final: called once per optimizer step, before hooks, clipping and the step.

        Reduced over ranks, divided by the window, divided by the loss scale; an overflow anywhere is known everywhere.
        """
        self._shared_norm = None
        module = self.connected_module
        if module.automatic_optimization:
            planned, batches = module.trainer.accumulate_grad_batches, module.trainer.num_training_batches
            factor = self._window.correction(planned, self.mesh.data_group, self.root_device, batches)
            if factor != 1.0:
                scale_gradients(module.parameters(), factor)
        self.sum_up_gradients()
        scaler = self._scaler
        if scaler is not None:
            finite = scaler.unscale(self.precision_plugin.main_params(optimizer))
            # Over the world and not only over the ranks that share a parameter: a stage or an expert steps with the others.
            if self._post is not None and self._post.optimistic:
                overflow = self._post.overflow(not finite)
            else:
                overflow = not finite if self.world_size == 1 else self.reduce_boolean_decision(not finite, all=False)
            if overflow:
                self.leave_out_overflow()
        self._stepping = True

    def leave_out_overflow(self) -> None:
        """Leaves the present optimizer step out, as gradients are not finite on some rank."""
        self.overflow, self._skip_reason = True, LOSS_SCALE

    def prepare_clipping(self, optimizer: Any) -> None:
        """Makes the gradients of an optimizer's parameters those that its step will use; before clipping, on every rank.

        In automatic steps they are by then. A manual step clips before `optimizer.step()`, when they still carry the loss scale.
        """
        if self._stepping:
            return
        self.sum_up_gradients()
        if self._scaler is not None:
            self._scaler.unscale(self.precision_plugin.main_params(optimizer))

    def sum_up_gradients(self) -> None:
        """Adds to gradients what axes still have to, once after each backward; all ranks that hold the same weights call it."""
        if self._summed_up:
            return
        for applied in self.parallelized:
            applied.finalize_gradients()
        self._summed_up = True

    @property
    def _scaler(self) -> LossScaler | None:
        plugin = self.precision_plugin
        return plugin.scaler if isinstance(plugin, FiveDPrecision) else None

    def skip_step(self, reason: str) -> None:
        """Leaves the present optimizer step out; to be called in `on_before_optimizer_step`, on all ranks alike.

        Weights, optimizer states and step-wise learning-rate schedules then stay as they are, and the step is counted in
        `skipped_steps` under its reason. A step that is left out already keeps its first reason.

        Raises:
            MisconfigurationException: Where no optimizer step is being made.
            ValueError: If the reason is empty.
        """
        if not reason:
            raise ValueError("skip_step needs a reason, which is what the step is counted under.")
        if not self._stepping:
            raise MisconfigurationException(
                "skip_step was called outside of an optimizer step. Call it in `on_before_optimizer_step`, where gradients are"
                " final and the step has not been made."
            )
        self._skip_reason = self._skip_reason or reason

    @property
    def skipping(self) -> bool:
        """Whether the present optimizer step is left out, or the last one was; until the next window."""
        return self._skip_reason is not None

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        self.overflow, self._skip_reason = False, None
        if self._post is not None:
            self._post.begin(optimizer)
        try:
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            self._stepping = False
        self.count_step(optimizer, self._skip_reason)
        for applied in self.parallelized:
            applied.after_optimizer_step()
        if self._post is not None:
            self._post.after_step()
        return result

    def step_again(self, optimizer: Optimizer, default_dtype: torch.dtype) -> None:
        """Makes a step on final gradients, without anything around it, after an optimistic one was taken back."""
        self.parameters_will_change()
        if isinstance(self.precision_plugin, FiveDPrecision):
            self.precision_plugin.step_again(optimizer, default_dtype)
        for applied in self.parallelized:
            applied.after_optimizer_step()

    def settle_step(self) -> None:
        """Makes the last optimizer step final, for hooks that look at weights or optimizer states; all ranks call it together.

        It matters under ``PipelineParallel(post_validation=True)``, between an optimizer step and the next `training_step`, and
        does nothing otherwise. Evaluation, checkpoints, `unsharded` and `gradient_norm` do it by themselves.
        """
        if self._post is not None and not self._stepping:
            self._post.settle()

    def count_step(self, optimizer: Optimizer, skipped: str | None) -> None:
        """Counts a step, and tells the loss scaler.

        Args:
            optimizer: Whose step it was.
            skipped: Why it was left out; ``None`` if it was made.
        """
        index = next((i for i, known in enumerate(self.optimizers) if known is optimizer), 0)
        scaler = self._scaler
        if skipped is None:
            self.skipped_steps.made(index)
        else:
            self.skipped_steps.skipped(skipped, None if scaler is None else scaler.scale, index)
        if scaler is not None:
            scaler.update(skipped == LOSS_SCALE, waiting=self.connected_module.parameters())

    def last_gradients_known(self) -> None:
        """Called by the precision plugin after hooks and clipping."""
        if self._post is not None and self._post.optimistic:
            self._post.before_step()

    def parameters_will_change(self) -> None:
        """Called by the precision plugin between the last hook on gradients and the step itself."""
        for applied in self.parallelized:
            applied.before_optimizer_step()

    def gradient_norm(self, parameters: Iterable[Tensor] | None = None, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients over all axes, the same number on every rank; every rank calls it.

        Args:
            parameters: The parameters whose gradients count; all of the module's if ``None``.
            norm_type: The p of the p-norm, ``inf`` included.
        """
        chosen = self.connected_module.parameters() if parameters is None else parameters
        return self.gradient_norms([chosen], norm_type)[0]

    def gradient_norms(self, groups: Sequence[Iterable[Tensor]], norm_type: float = 2.0) -> Tensor:
        """`gradient_norm` of several groups of parameters, shape (G,), in the one collective that one of them takes."""
        self.settle_step()
        return global_norms(groups, self.mesh, norm_type, self.gradient_axes)

    def share_norm(self, optimizer: Any, norm: Tensor) -> None:
        """Spares this step's clipping by norm the work, where a callback has just taken the 2-norm of the same gradients.

        Args:
            optimizer: The optimizer that is about to step.
            norm: The `gradient_norm` of its parameters. They must not change until clipping; all ranks share or none.
        """
        self._shared_norm = (unwrapped(optimizer), norm)

    def norm_to_clip(self, optimizer: Any, parameters: Sequence[Tensor], bound: float) -> Tensor:
        """The 2-norm that clipping needs: the shared one, once, or a fresh one, or of an optimistic step what is known of it."""
        if self._post is not None and self._post.optimistic and self._stepping:
            return self._post.norm(parameters, bound)
        shared, self._shared_norm = self._shared_norm, None
        if shared is not None and shared[0] is unwrapped(optimizer):
            return shared[1]
        return self.gradient_norm(parameters)

    def gradient_axes(self, parameter: Tensor) -> list[str] | None:
        """What all axes say about who counts a parameter's gradient; see `Parallelized.gradient_axes`."""
        axes: list[str] = []
        for applied in self.parallelized:
            of_plugin = applied.gradient_axes(parameter)
            if of_plugin is None:
                return None
            axes += of_plugin
        return axes

    @override
    def on_validation_start(self) -> None:
        self._enter_evaluation()

    @override
    def on_validation_end(self) -> None:
        self._evaluation.close()
        if self.logs is not None:
            self.logs.loop_end()

    @override
    def on_test_start(self) -> None:
        self._enter_evaluation()

    @override
    def on_test_end(self) -> None:
        self._evaluation.close()

    @override
    def on_predict_start(self) -> None:
        self._enter_evaluation(uneven=self.uneven_prediction)

    @override
    def on_predict_end(self) -> None:
        self._evaluation.close()
        self.uneven_prediction = False

    def _enter_evaluation(self, uneven: bool = False) -> None:
        self.settle_step()
        for applied in self.parallelized:
            self._evaluation.enter_context(applied.evaluation_context(uneven=uneven))

    @contextmanager
    def unsharded(self) -> Generator[None, None, None]:
        """A context in which the module's parameters are whole on every rank; all ranks enter it together.

        For generation or inspection in callbacks: calling the module needs no communication inside. In mixed precision the
        whole parameters are the 16-bit copies that modules compute from.
        """
        self.settle_step()
        with ExitStack() as contexts:
            contexts.enter_context(self.precision_plugin.forward_context())
            for applied in self.parallelized:
                contexts.enter_context(applied.unsharded())
            yield


def _called_by(applied: Parallelized, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return applied.call(step, args, kwargs)

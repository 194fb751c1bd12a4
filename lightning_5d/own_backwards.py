"""Backwards that a user's code runs by itself, in steps and in hooks, beside those that Lightning has run.

[Note: backwards nobody has announced]
Adversarial training, perturbed embeddings and penalties call ``loss.backward()`` on their own, for the gradients of inputs or of
weights. What axes do around a backward (end the root's forward, add up over ranks) has to be done around these as well:
what one of them has left half done would reach the step, past a ``zero_grad`` in between. So all backwards of the process pass
here while a Trainer runs, and those that reach the module's weights get what a backward of Lightning's gets. After them
``grad`` is what it is in one process. Backwards of other modules (a probe's, in a callback of one rank) are left alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.distributed.tensor import DTensor

from lightning_5d.parallelism import Parallelized
from lightning_5d.precision import around_backward
from lightning_5d.scheduling import Scheduling

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins import Precision

    from lightning_5d.mesh import ParallelMesh

_WAYS_OUT = "Use torch.autograd.grad(loss, inputs) for the gradients of inputs"


class Steps(Protocol):
    """What of the strategy matters here."""

    parallelized: list[Parallelized]
    uneven_prediction: bool

    @property
    def connected_module(self) -> pl.LightningModule:
        """The user's module."""

    @property
    def mesh(self) -> ParallelMesh:
        """The ranks by axis."""

    @property
    def precision_plugin(self) -> Precision:
        """What knows in which context a backward runs."""

    def note_own_backward(self) -> None:
        """Comes after a backward of the user's own that has added to gradients of weights."""


class OwnBackwards:
    """Sees to it that a backward of the user's own is one of all ranks.

    Args:
        steps: The strategy.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._announced = self._warned = False

    @contextmanager
    def announced(self, is_announced: bool = True) -> Iterator[None]:
        """Around backwards around which everything is done already."""
        before, self._announced = self._announced, is_announced
        try:
            yield
        finally:
            self._announced = before

    @contextmanager
    def around(self, step: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        """Around one call of a user's step by all axes, of which one may run backwards beside it; gives what they are to call."""

        def by_the_user(*args: Any, **kwargs: Any) -> Any:
            with self.announced(False):
                return step(*args, **kwargs)

        with self.announced(self._runs_schedules):
            yield by_the_user

    @contextmanager
    def watched(self) -> Generator[None, None, None]:
        """Around all of the user's code: backwards of this thread pass here."""
        # Checked with torch 2.13: `Tensor.backward`, `torch.autograd.backward` and `torch.autograd.grad` end in this one function, however
        # they were imported; torch replaces it likewise where it traces.
        original, thread = torch.autograd._engine_run_backward, threading.get_ident()

        def run(outputs: Sequence[Any], grads: Any, *args: Any, **kwargs: Any) -> Any:
            # Inside of a backward: a reentrant checkpoint runs another one.
            nested = self._announced or torch._C._current_graph_task_id() != -1
            if nested or threading.get_ident() != thread:
                return original(outputs, grads, *args, **kwargs)
            _, create_graph, inputs = args[:3]
            if not kwargs.get("accumulate_grad"):
                self._check_grad(outputs, inputs)
                return original(outputs, grads, *args, **kwargs)
            if not self._reaches_weights(outputs, inputs):
                return original(outputs, grads, *args, **kwargs)
            self._check(create_graph)
            return self._run(outputs, lambda started: original(started, grads, *args, **kwargs))

        torch.autograd._engine_run_backward = run  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.autograd._engine_run_backward = original

    def _run(self, outputs: Sequence[Any], backward: Callable[[Sequence[Any]], Any]) -> Any:
        axes = self._steps.parallelized
        with ExitStack() as contexts:
            for applied in axes:
                contexts.enter_context(applied.own_backward())
            for applied in reversed(axes):
                outputs = [applied.before_backward(one) if isinstance(one, Tensor) else one for one in outputs]
            with self.announced(), (around_backward(self._steps.precision_plugin) or nullcontext)():
                result = backward(tuple(outputs))
            for applied in reversed(axes):
                applied.after_backward()
        self._steps.note_own_backward()
        return result

    def _reaches_weights(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> bool:
        return self._check_inputs(outputs, inputs) if inputs else _reaches(outputs, self._weights())

    def _weights(self) -> set[int]:
        """What of the module takes gradients."""
        standing_in = [weight for applied in self._steps.parallelized for weight in applied.standing_in()]
        return {
            id(weight) for weight in (*self._steps.connected_module.parameters(), *standing_in) if weight.requires_grad
        }

    def _check(self, create_graph: bool) -> None:
        kind = type(self._steps.connected_module).__name__.removeprefix("FSDP")  # which FSDP2 puts in front
        if self._runs_schedules:
            raise MisconfigurationException(
                f"{kind} calls `backward` by itself, but under a pipeline each rank has a stage of the module, and backwards run by"
                " a schedule. Return the sum of losses from training_step, or leave PipelineParallel out."
            )
        if self._without_exchanges:
            raise MisconfigurationException(
                f"{kind} calls `backward` while ranks have different numbers of batches to predict, so gradients of weights cannot be"
                f" averaged over them. {_WAYS_OUT}, or give `predict` a data set that the ranks divide evenly."
            )
        if create_graph and self._shares:
            raise MisconfigurationException(
                f"{kind} calls `backward(create_graph=True)` by itself. Gradients of weights are added up over ranks, and that has no"
                f" graph. {_WAYS_OUT} with create_graph=True."
            )

    @property
    def _runs_schedules(self) -> bool:
        return any(isinstance(applied, Scheduling) for applied in self._steps.parallelized)

    @property
    def _without_exchanges(self) -> bool:
        stage = self._steps.connected_module.trainer.state.stage
        return self._steps.uneven_prediction and stage == RunningStage.PREDICTING

    @property
    def _shares(self) -> list[str]:
        """The axes over which gradients of weights are added up."""
        return [axis for axis in ("dp_replicate", "dp_shard", "cp", "tp") if self._steps.mesh.size(axis) > 1]

    def _check_inputs(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> bool:
        """Whether weights are among what gradients are asked for: they have to be what modules have computed with."""
        weights = self._weights()
        asked = [one for one in inputs if id(one) in weights]
        lost = next(
            (one for one in asked if isinstance(one, DTensor) and not _reaches(outputs, {id(one)}, False)), None
        )
        if lost is not None:
            raise MisconfigurationException(
                f"The gradient of {self._name(lost)} is asked for, and the module holds a shard of it now: modules have computed with the"
                " whole weight, which was freed after that. Call loss.backward(), which leaves gradients in `grad`, or use a stage of ZeRO"
                " below 3, which keeps weights whole through a step."
            )
        return bool(asked)

    def _check_grad(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        """What `torch.autograd.grad` gives of weights is this rank's."""
        shares = self._shares
        if not shares or not self._check_inputs(outputs, inputs):
            return
        if "tp" in shares:
            raise MisconfigurationException(
                "torch.autograd.grad asks for gradients of weights. Each rank of TensorParallel has a part of them, some of which are summands"
                " of the true ones. Call loss.backward(), which leaves them complete in `grad`, or leave TensorParallel out."
            )
        if not self._warned:
            self._warned = True
            rank_zero_warn(
                "torch.autograd.grad gives gradients of weights from this rank's part of the batch alone, as one process would from a"
                " smaller batch; loss.backward() leaves those of all ranks in `grad`."
            )

    def _name(self, weight: Any) -> str:
        named = self._steps.connected_module.named_parameters()
        return next((name for name, parameter in named if parameter is weight), "a weight")


def _reaches(outputs: Iterable[Any], weights: set[int], opaque: bool = True) -> bool:
    """Whether a backward would come to one of these weights, or (``opaque``) to a node in which it cannot be seen where it goes."""
    waiting = [node for one in outputs if (node := _node(one)) is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if (opaque and isinstance(node, BackwardCFunction)) or id(getattr(node, "variable", None)) in weights:
            return True
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return False


def _node(output: Any) -> Any:
    if not isinstance(output, Tensor):
        return output.node  # a `GradientEdge`
    return torch.autograd.graph.get_gradient_edge(output).node if output.requires_grad else None

"""Runs a schedule on this rank: any valid one, with receives posted ahead and sends that nobody waits for."""

# [Note: no deadlock]
# A rank waits only for messages that its next action needs. Messages between two ranks arrive in the order in which they
# are sent, which is the order of the sender's row; so the receiver posts them in that order, and a few more than it needs. A
# sender never waits. What is left is the order of the actions themselves, and `validate` has checked that.

# [Note: shapes]
# The first message of each input signature into a stage comes with a description of itself: both ends see the same
# signatures in the same order, so both know when. From then on nothing but tensors travels, and receives can be posted
# ahead. A payload that does not fit what was agreed for its signature is an error on the rank that would send it.

# [Note: a second start]
# With post-validation the forwards before a rank's `Program.settles` may have run on weights that are not final. If so, every
# rank stops there, as all hear the same, and starts again. What travels by then is known without a word: of each sender
# exactly its messages before that point, and no rank has taken or expected another. They are received and dropped.

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_5d.parallelism import Parallelized
from lightning_5d.pipeline_parallel.payload import Forms, PayloadSpec, take_apart
from lightning_5d.pipeline_parallel.program import Message, Program, Step
from lightning_5d.pipeline_parallel.schedule import Kind
from lightning_5d.pipeline_parallel.stage import Boundary

if TYPE_CHECKING:
    from lightning_5d.pipeline_parallel.channels import Arriving, Channels
    from lightning_5d.pipeline_parallel.deferred_weights import DeferredWeights, WeightQueue
    from lightning_5d.pipeline_parallel.stage import Cut
    from lightning_5d.pipeline_parallel.trace import Recorder

_AHEAD = 2
"""Messages per sender that are expected before they are needed."""


class StaleForwardsError(Exception):
    """A run has ended before its first backward, as the weights it has begun with are not the final ones."""


@dataclass(frozen=True)
class Work:
    """One microbatch as a step of the user takes it.

    Attributes:
        args: Positional arguments, the microbatch first.
        kwargs: Keyword arguments.
        signature: Microbatches of one signature have payloads of the same shapes.
        around: Makes a context around the step, for a stage.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    signature: Hashable
    around: Callable[[int], AbstractContextManager[None]]


@dataclass(slots=True)
class _Live:
    """What a stage keeps of a microbatch between its forward and its backward."""

    received: tuple[Tensor, ...]
    edges: tuple[GradientEdge | None, ...] = ()
    loss: Tensor | None = None


@dataclass
class _Run:
    """The state of one run of a program."""

    program: Program
    work: Sequence[Work]
    step: Callable[..., Any]
    begin_backward: Callable[[int, Any], tuple[Tensor, Tensor] | None]
    around_backward: Callable[[], AbstractContextManager[None]]
    confirm: Callable[[], bool] | None = None
    tell: Callable[[dict[int, Any]], None] | None = None
    outputs: dict[int, Any] = field(default_factory=dict)
    live: dict[tuple[int, int], _Live] = field(default_factory=dict)
    weights: dict[tuple[int, int], WeightQueue] = field(default_factory=dict)
    here: dict[Message, tuple[list[Tensor], PayloadSpec]] = field(default_factory=dict)
    arriving: dict[Message, Arriving | _Nothing] = field(default_factory=dict)
    posted: dict[int, int] = field(default_factory=dict)

    def place(self, stage: int, microbatch: int) -> tuple[int, int, Hashable]:
        """What payloads of equal shapes have in common: where they enter, and the signature of their input."""
        return self.program.schedule.copies[microbatch], stage, self.work[microbatch].signature

    def forget(self) -> None:
        """Drops what is under way: the traceback of an error outlives the step, and would keep it all."""
        for held in (self.live, self.weights, self.here, self.arriving):
            held.clear()


class _Nothing:
    """A message that nobody sends: the gradients of a payload that needs none."""

    def wait(self) -> list[Tensor]:
        return []


_NOTHING = _Nothing()


class Executor:
    """Runs programs on one rank of a pipeline.

    Args:
        cut: This rank's stages.
        channels: Messages to and from the other ranks.
        axes: The other axes at work, which are told when a stage begins and ends.
        deferred: Splits backward where a program asks for it.
        device: Where computation happens.
        dynamic: Every payload is described anew, for models whose shapes depend on values.

    Attributes:
        recorder: Is told what happens when; ``None`` for nothing.
        peak_live: The most activations kept at a time, in stages times microbatches, in the last run.
    """

    def __init__(
        self,
        cut: Cut,
        channels: Channels,
        axes: Sequence[Parallelized],
        deferred: DeferredWeights | None,
        device: torch.device,
        *,
        dynamic: bool = False,
    ) -> None:
        self._cut, self._channels, self._deferred, self._device = cut, channels, deferred, device
        self._begins = [axis.part_begins for axis in axes if type(axis).part_begins is not Parallelized.part_begins]
        self._ends = [axis.part_ends for axis in axes if type(axis).part_ends is not Parallelized.part_ends]
        self._dynamic, self._forms = dynamic, Forms(axes)
        self._specs: dict[tuple[int, int, Hashable], PayloadSpec] = {}
        # Which of the trained tensors of a payload get a gradient; the others are used behind a `detach`, or not at all.
        self._returned: dict[tuple[int, int, Hashable], tuple[bool, ...]] = {}
        self._outlines: dict[Hashable, Any] = {}
        self.recorder: Recorder | None = None
        self.peak_live = self._live = 0
        self._does = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT_GRADIENT: self._backward,
            Kind.WEIGHT_GRADIENT: self._weight_gradient,
        }

    def forget_shapes(self) -> None:
        """Agrees anew on all shapes and on who wants gradients; all ranks of the pipeline forget at the same point."""
        self._specs.clear()
        self._returned.clear()
        self._outlines.clear()

    def run(
        self,
        program: Program,
        work: Sequence[Work],
        step: Callable[..., Any],
        begin_backward: Callable[[int, Any], tuple[Tensor, Tensor] | None],
        around_backward: Callable[[], AbstractContextManager[None]] = nullcontext,
        confirm: Callable[[], bool] | None = None,
        tell: Callable[[dict[int, Any]], None] | None = None,
    ) -> dict[int, Any]:
        """Runs a program.

        Args:
            program: What to do, for as many microbatches as there is work.
            work: The microbatches.
            step: The user's step.
            begin_backward: Called with a microbatch and what the step returned for it, right after its last stage's forward:
                the loss and the gradient to start from, or ``None`` for no backward.
            around_backward: Makes the context that gradients are computed in.
            confirm: Called after the forwards that may run on weights which are not final: says whether they were, the same
                on all ranks.
            tell: Called with what the step returned, as soon as it is there for all microbatches, where all of them end here.

        Returns:
            What the step returned, by microbatch, of those whose last stage is here.

        Raises:
            StaleForwardsError: If they were not; the run can be started again then.
        """
        run = _Run(program, work, step, begin_backward, around_backward, confirm, tell)
        self._live = self.peak_live = 0
        try:
            for index, each in enumerate(program.steps):
                if run.confirm is not None and index == program.settles:
                    self._settle(run)
                stage = each.action.stage
                for begins in self._begins:
                    begins(stage)
                self._does[each.action.kind](run, each)
                for ends in self._ends:
                    ends(stage, gradients=each.gradients, complete=each.complete, partly=each.partly)
            self._channels.finish()
        except BaseException as error:
            run.forget()
            raise error
        return run.outputs

    def _settle(self, run: _Run) -> None:
        confirm, run.confirm = run.confirm, None
        if confirm is None or confirm():
            self._tell(run)
            return
        for source, count in run.program.early.items():
            while run.posted.get(source, 0) < count:
                self._post_next(run, source)
        for arriving in run.arriving.values():
            arriving.wait()
        if self.recorder is not None:
            self.recorder.restart()
        raise StaleForwardsError

    def _tell(self, run: _Run) -> None:
        if run.tell is not None and run.confirm is None and len(run.outputs) == run.program.microbatches:
            tell, run.tell = run.tell, None
            tell(run.outputs)

    # Actions

    def _forward(self, run: _Run, step: Step) -> None:
        action = step.action
        stage, microbatch = action.stage, action.microbatch
        work, backward = run.work[microbatch], run.program.backward
        payload: Any = None
        received: tuple[Tensor, ...] = ()
        if stage:
            tensors, spec = self._take(run, Message(False, stage, microbatch), step.source)
            if backward:
                received = tuple(
                    tensor.requires_grad_() for tensor, leaf in zip(tensors, spec.tensors, strict=True) if leaf.trained
                )
            payload = spec.together(tensors, self._forms)
            del tensors
        self._live += backward
        self.peak_live = max(self.peak_live, self._live)
        mark = self.recorder.begin() if self.recorder is not None else None
        with work.around(stage):
            result = self._cut.run(stage, run.step, work.args, work.kwargs, payload, self._outlines.get(work.signature))
        self._record(mark, step)
        live = _Live(received)
        if isinstance(result, Boundary):
            live.edges = self._hand_on(run, step, result.payload)
        else:
            run.outputs[microbatch] = result.output
            self._tell(run)
            if backward and (start := run.begin_backward(microbatch, result.output)) is not None:
                loss, gradient = start
                live.edges, live.loss = (get_gradient_edge(loss),), gradient
        if backward:
            run.live[stage, microbatch] = live

    def _backward(self, run: _Run, step: Step) -> None:
        action = step.action
        stage, microbatch = action.stage, action.microbatch
        gradients: Sequence[Tensor]
        live = run.live.pop((stage, microbatch))
        entries = live.edges
        if stage + 1 < run.program.schedule.stages:
            gradients, _ = self._take(run, Message(True, stage, microbatch), step.source)
            returned = self._returned.get(run.place(stage + 1, microbatch), ())
            entries = tuple(edge for edge, comes in zip(live.edges, returned, strict=True) if comes)
        else:
            gradients = () if live.loss is None else (live.loss,)
        pairs = [(edge, grad) for edge, grad in zip(entries, gradients, strict=True) if edge is not None]
        mark = self.recorder.begin() if self.recorder is not None else None
        split = action.kind is Kind.INPUT_GRADIENT
        if pairs:
            edges, starts = [edge for edge, _ in pairs], [grad for _, grad in pairs]
            del pairs, gradients, entries
            live.edges = ()
            with run.around_backward():
                if split and self._deferred is not None:
                    with self._deferred.collecting() as queue:
                        torch.autograd.backward(edges, starts)
                    run.weights[stage, microbatch] = queue
                else:
                    torch.autograd.backward(edges, starts)
        self._live -= not split
        self._record(mark, step)
        if stage:
            self._hand_back(run, step, live.received)

    def _weight_gradient(self, run: _Run, step: Step) -> None:
        mark = self.recorder.begin() if self.recorder is not None else None
        queue = run.weights.pop((step.action.stage, step.action.microbatch), None)
        if queue is not None:
            with run.around_backward():
                queue.run()
        self._live -= 1
        self._record(mark, step)

    # Results for other stages

    def _hand_on(self, run: _Run, step: Step, payload: Any) -> tuple[GradientEdge | None, ...]:
        """Sends a forward's result on; returns where its gradients will enter."""
        stage, microbatch = step.action.stage, step.action.microbatch
        signature = run.work[microbatch].signature
        tensors, spec = take_apart(payload, stage, self._forms)
        key = run.place(stage + 1, microbatch)
        agreed = self._specs.get(key)
        news = agreed is None or self._dynamic
        if stage == 0 and (self._dynamic or signature not in self._outlines):
            self._outlines[signature] = self._cut.outline()
        if agreed is None or news:
            self._specs[key] = agreed = spec
        elif not agreed.fits(spec):
            raise ValueError(_changed(stage, agreed, spec))
        sent = [tensor.detach() for tensor in tensors]
        if step.target is None:
            run.here[Message(False, stage + 1, microbatch)] = sent, agreed
        else:
            if news:
                self._channels.send_object((agreed, self._outlines.get(signature)), step.target)
            self._send(sent, step.target, Message(False, stage + 1, microbatch))
        if not run.program.backward:
            return ()
        trained = [tensor for tensor, leaf in zip(tensors, agreed.tensors, strict=True) if leaf.trained]
        # An edge keeps the graph and not the result, which may go as soon as it has been sent.
        return tuple(get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in trained)

    def _hand_back(self, run: _Run, step: Step, received: tuple[Tensor, ...]) -> None:
        stage, microbatch = step.action.stage, step.action.microbatch
        place = run.place(stage, microbatch)
        agreed = self._returned.get(place)
        if received and (agreed is None or self._dynamic):
            agreed = self._returned[place] = tuple(tensor.grad is not None for tensor in received)
            if step.target is not None:
                self._channels.send_object(agreed, step.target)
        gradients = []
        for tensor, comes in zip(received, agreed or (), strict=True):
            if comes:
                gradients.append(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
            elif tensor.grad is not None:
                raise ValueError(_now_used(stage))
        message = Message(True, stage - 1, microbatch)
        if step.target is None:
            run.here[message] = gradients, self._specs[place]
        elif gradients:
            self._send(gradients, step.target, message)

    def _send(self, tensors: list[Tensor], target: int, message: Message) -> None:
        mark = self.recorder.begin() if self.recorder is not None else None
        self._channels.send(tensors, target)
        if self.recorder is not None and mark is not None:
            nbytes = sum(tensor.nbytes for tensor in tensors)
            self.recorder.end(mark, "send", message.stage, message.microbatch, self._live, peer=target, nbytes=nbytes)

    # What other stages have sent

    def _take(self, run: _Run, message: Message, source: int | None) -> tuple[list[Tensor], PayloadSpec]:
        """Waits for a message."""
        if source is None:
            return run.here.pop(message)
        mark = self.recorder.begin() if self.recorder is not None else None
        expected = run.program.incoming[source]
        while message not in run.arriving:
            self._post_next(run, source)
        tensors = run.arriving.pop(message).wait()
        spec = self._spec(run, message)
        # Those that come next may arrive while this rank computes.
        limit = len(expected) if run.confirm is None else run.program.early[source]
        while (
            (posted := run.posted[source]) < limit
            and len(run.arriving) < _AHEAD
            and self._expected(run, expected[posted])
        ):
            self._post_next(run, source)
        if self.recorder is not None and mark is not None:
            nbytes = sum(tensor.nbytes for tensor in tensors)
            self.recorder.end(
                mark, "receive", message.stage, message.microbatch, self._live, peer=source, nbytes=nbytes
            )
        return tensors, spec

    def _post_next(self, run: _Run, source: int) -> None:
        posted = run.posted.get(source, 0)
        run.posted[source] = posted + 1
        message = run.program.incoming[source][posted]
        if not (message.gradient or self._expected(run, message)):
            spec, outline = self._channels.receive_object(source)
            self._specs[run.place(message.stage, message.microbatch)] = spec
            self._outlines[run.work[message.microbatch].signature] = outline
        spec = self._spec(run, message)
        leaves = spec.tensors
        if message.gradient:
            place = run.place(message.stage + 1, message.microbatch)
            if spec.trained and not self._expected(run, message):
                self._returned[place] = self._channels.receive_object(source)
            comes = self._returned.get(place, ())
            leaves = tuple(leaf for leaf, does in zip(spec.trained, comes, strict=True) if does)
        shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
        run.arriving[message] = self._channels.receive(shapes, source) if shapes else _NOTHING

    def _expected(self, run: _Run, message: Message) -> bool:
        """Whether a message's shapes are known before it is needed."""
        place = run.place(message.stage + message.gradient, message.microbatch)
        if self._dynamic or place not in self._specs:
            return False
        return not message.gradient or place in self._returned or not self._specs[place].trained

    def _spec(self, run: _Run, message: Message) -> PayloadSpec:
        """Of a gradient: the spec of the activation that it belongs to."""
        return self._specs[run.place(message.stage + message.gradient, message.microbatch)]

    def _record(self, mark: Any, step: Step) -> None:
        if self.recorder is not None and mark is not None:
            action = step.action
            self.recorder.end(mark, action.kind.value, action.stage, action.microbatch, self._live)


def _now_used(stage: int) -> str:
    return (
        f"What stage {stage} gets from stage {stage - 1} has a gradient now, and had none the first time, for inputs of the same shapes."
        " If that depends on values in the batch, give PipelineParallel dynamic=True."
    )


def _changed(stage: int, agreed: PayloadSpec, spec: PayloadSpec) -> str:
    if agreed.tensors and [(leaf.shape, leaf.dtype) for leaf in agreed.tensors] == [
        (leaf.shape, leaf.dtype) for leaf in spec.tensors
    ]:
        return (
            f"What stage {stage} hands to stage {stage + 1} needs gradients now, and did not at first: weights were unfrozen in the"
            " middle of an epoch. Unfreeze them in on_train_epoch_start or before training, or give PipelineParallel dynamic=True."
        )
    return (
        f"What stage {stage} hands to stage {stage + 1} was ({agreed}) and is now ({spec}), for inputs of the same shapes. If shapes"
        " depend on values in the batch, give PipelineParallel dynamic=True."
    )

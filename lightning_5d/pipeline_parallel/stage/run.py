"""One run of a stage: what modules of other stages give meanwhile, and where it stops."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointFunction

from lightning_5d.pipeline_parallel.stage.dependence import Dependence
from lightning_5d.pipeline_parallel.stage.layout import Place, StageLayout
from lightning_5d.pipeline_parallel.stage.outline import Outline, TensorOutline, hollowed, outlined, tensors_of
from lightning_5d.pipeline_parallel.stage.recorded import apart, keep, with_logits
from lightning_5d.whole_length import marked_like


class StageBoundary(Exception):
    """Stops a step behind the last block of a stage. `Cut.run` catches it; it passes through the user's own contexts."""


class Run:
    """One run of a stage.

    Args:
        layout: Which stage holds what.
        stage: The stage.
        received: What the stage before handed on.
        outline: What modules before the blocks return.
        device: Where tensors are made.
        watch: Follows hollow tensors, if this is the first run with this outline.

    Attributes:
        reached: Whether the step has come to the stage's blocks.
        stopped: Whether the stage has come to its end.
        payload: What it then hands on.
        calls: What calls of modules before the blocks returned, by the module's name.
        order: Own blocks in the order in which they ran, if somebody writes it down.
    """

    def __init__(
        self,
        layout: StageLayout,
        stage: int,
        received: Any,
        outline: Outline | None,
        device: torch.device,
        watch: Dependence | None = None,
    ) -> None:
        self.layout, self.stage = layout, stage
        self.outline, self.watch = outline, watch
        self.received, self._logits = apart(received)
        self.reached = self.stopped = False
        self.payload: Any = None
        self.calls: dict[str, list[Any]] = {}
        self.order: list[int] | None = None
        self._low, self._high = layout.spans[stage]
        self._device = device
        self._entered = False
        self._grad = torch.is_grad_enabled()
        self._counts: dict[str, int] = {}
        self._earlier: Any = None
        self._lent: list[tuple[str, Tensor, int]] = []

    # Modules of other stages

    def block(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a block of another stage gives."""
        if index >= self._high:
            if self.stage == 0 and index == 0:  # an empty first stage
                self.stop(hidden_of(args, kwargs))
            self._refuse_order(index)
        if self._entered or (self.reached and index == self._low - 1):
            self._refuse_second(index)
        if index == self._low - 1:
            self.reached = True
            keep(lent(self._logits))
            return lent(self.received)
        # Only the last one's result is used. What the code around makes of the others' is lost, or can be seen to be wrong.
        if self._earlier is None:
            self._earlier = self._hollow("", self.received, "the result of an earlier stage's block")
        return self._earlier

    def other(self, place: Place) -> Any:
        """What a module of another stage gives that runs before or after the blocks."""
        name, side = place.name, place.side
        if side == "after":
            raise MisconfigurationException(
                f"{name} ran before {self._end()} had, on stage {self.stage}, but it is registered behind the blocks, so only the"
                f" last stage has it. If it runs before the blocks, the plan has to say so: ParallelPlan(before=[{name!r}]); if on"
                f" both sides of them, ParallelPlan(before=[{name!r}], after=[{name!r}]). No block may be left out."
            )
        if self.reached:
            last = self.stage == self.layout.stages - 1
            hint = (
                f" If the step calls the model twice, call it once, with both inputs in one batch. If {name} runs after the blocks, the"
                f" plan has to say so: ParallelPlan(after=[{name!r}]); if on both sides of them, ParallelPlan(before=[{name!r}],"
                f" after=[{name!r}])."
                if last
                else " A module that several blocks share has to be inside of each block."
            )
            raise MisconfigurationException(
                f"{name} ran behind block {self.layout.blocks[max(self._low - 1, 0)]}, but it is registered before the blocks,"
                f" so only the first stage has it.{hint}"
            )
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        known = () if self.outline is None else self.outline.calls.get(name, ())
        if number >= len(known):
            raise MisconfigurationException(
                f"{name} ran {number + 1} times on stage {self.stage}, but {len(known)} times on the first stage. All stages"
                " have to go through a step in the same way."
            )
        return self._hollow(name, known[number], f"the result of {name}")

    def weight(self, name: str, like: Tensor) -> Tensor:
        """What a weight of another stage's module gives."""
        tensor = TensorOutline(tuple(like.shape), like.dtype).hollow(self._device)
        if self.watch is not None:
            self.watch.mark(tensor, name)
        return tensor

    def _hollow(self, name: str, like: Any, source: str) -> Any:
        outline = self.outline
        writable = self.watch is not None or (outline is not None and name in outline.written)
        value = hollowed(like, self._device, writable=writable)
        if self.watch is not None:
            self.watch.mark(value, source)
            self._lent += [(name, tensor, tensor._version) for tensor in tensors_of(value)]
        return value

    def written(self) -> set[str]:
        """Names of modules whose results have been written to; empty for the blocks of earlier stages."""
        return {name for name, tensor, version in self._lent if tensor._version != version}

    # Modules of this stage

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Comes before the stage's first block; returns other arguments for it, or ``None``."""
        if self._entered:
            # A second time is a recomputation, if a backward asks for it.
            if torch._C._current_graph_task_id() != -1:  # private; checked with torch 2.13
                return None
            self._refuse_second(self._low)
        self._entered = self.reached = True
        return with_hidden(args, kwargs, lent(self.received)) if self.begins_with_received else None

    @property
    def begins_with_received(self) -> bool:
        """Whether the first block's hidden input is replaced, as there is no block before it to give that: the first stage has none."""
        return self.stage > 0 and self._low == 0

    def stop(self, payload: Any) -> NoReturn:
        """Ends the run with what the stage hands on."""
        if self._grad and not torch.is_grad_enabled() and _in_reentrant_checkpoint():
            raise MisconfigurationException(
                f"The end of stage {self.stage} is inside of a reentrant checkpoint, which keeps no graph. Use"
                " torch.utils.checkpoint with use_reentrant=False, or FiveD(activation_checkpointing=...)."
            )
        if self.order is not None and self.order != list(range(self._low, self._high)):
            self._refuse_order_of_blocks(self.order)
        self.stopped, self.payload = True, with_logits(payload)
        raise StageBoundary

    def record(self, name: str, output: Any) -> None:
        """Comes behind a module before the blocks, on the first stage."""
        self.calls.setdefault(name, []).append(outlined(output))

    # What cannot be cut

    def _refuse_second(self, index: int) -> NoReturn:
        raise MisconfigurationException(
            f"{self.layout.blocks[index]} came a second time in one step, on stage {self.stage}. A model that is cut into stages"
            " runs once in a step: put both inputs into one batch, or train without pipeline parallelism."
        )

    def _refuse_order(self, index: int) -> NoReturn:
        raise MisconfigurationException(
            f"{self.layout.blocks[index]} came before {self._end()} had run, on stage {self.stage}. A model that is cut into stages runs all"
            " of its blocks, in the order in which they are registered; blocks that are skipped at random are not possible."
        )

    def _refuse_order_of_blocks(self, order: list[int]) -> NoReturn:
        blocks = self.layout.blocks
        raise MisconfigurationException(
            f"Stage {self.stage} ran {', '.join(blocks[index] for index in order)}, but it has"
            f" {', '.join(blocks[self._low : self._high])}. A model that is cut into stages runs all of its blocks, in the order"
            " in which they are registered."
        )

    def refuse_end(self) -> NoReturn:
        """The step has ended, and the stage has not."""
        raise MisconfigurationException(
            f"The step ended on stage {self.stage} without {self._end()}. A step of a model that is cut into stages has to run all"
            " of its blocks."
        )

    def _end(self) -> str:
        """The block that the stage cannot end without."""
        return self.layout.blocks[max(self._high - 1, 0)]


class _Lent(torch.autograd.Function):
    """The identity, so that code may write to what it gets: not to a leaf."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def lent(received: Any) -> Any:
    """A received structure as a step may use it."""
    if not torch.is_grad_enabled():
        return received
    return _lent(received) if isinstance(received, Tensor) else tree_map(_lent, received)


def _lent(leaf: Any) -> Any:
    if not (isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf):  # else an axis has made it of a leaf
        return leaf
    return marked_like(_Lent.apply(leaf), leaf)  # type: ignore[no-untyped-call]


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A block's hidden input: its first positional tensor, or its first tensor by name."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    raise MisconfigurationException(
        "The first block has no tensor among its arguments, so nothing can be handed on to it."
    )


def with_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A block's arguments with another hidden input."""
    for index, value in enumerate(args):
        if isinstance(value, Tensor):
            return (*args[:index], hidden, *args[index + 1 :]), kwargs
    for key, value in kwargs.items():
        if isinstance(value, Tensor):
            return args, {**kwargs, key: hidden}
    return args, kwargs


def _in_reentrant_checkpoint() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False

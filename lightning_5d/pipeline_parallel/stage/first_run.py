"""The first run of a stage, and of each signature of inputs: a close look at what the user's code does around the blocks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torchmetrics import Metric

from lightning_5d.pipeline_parallel.stage.dependence import Dependence
from lightning_5d.pipeline_parallel.stage.recorded import logits_so_far
from lightning_5d.pipeline_parallel.stage.run import Run, with_hidden
from lightning_5d.pipeline_parallel.stage.side_paths import SidePaths


class FirstRun:
    """Looks at one run: in which order blocks run, what goes into them, and what comes out of the step in the end.

    Args:
        run: The run.
        module: The user's module.
        blocks: The stage's blocks by number.
    """

    def __init__(self, run: Run, module: nn.Module, blocks: Mapping[int, nn.Module]) -> None:
        self._run, self._module, self._blocks = run, module, blocks
        self._names = run.layout.blocks
        self._watch: Dependence | None = run.watch
        self._paths: SidePaths | None = None
        if self._watch is not None and run.stage == run.layout.stages - 1:
            others = [place.name for place in run.layout.anatomy.places if place.block is None]
            self._paths = SidePaths(id(w) for name in others for w in module.get_submodule(name).parameters())

    @contextmanager
    def looking(self) -> Iterator[None]:
        """A context around the run.

        Raises:
            MisconfigurationException: From inside, if blocks get or a hook logs what another stage has.
        """
        self._run.order = []
        with ExitStack() as stack:
            for index, block in self._blocks.items():
                # What the code around the blocks gives them, before other axes make something else of it.
                entering = partial(self._entering, index)
                stack.callback(block.register_forward_pre_hook(entering, prepend=True, with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(self._leaving).remove)
            if self._watch is not None:
                if self._paths is not None:  # what the last stage logs and counts is what is logged
                    stack.enter_context(_checked(self._module, "log", self._check_log))
                    for name, module in self._module.named_modules():
                        if isinstance(module, Metric):
                            stack.enter_context(_checked(module, "update", partial(self._check_update, name)))
                stack.enter_context(self._watch)
            yield

    def check(self, output: Any) -> None:
        """Looks at what is left when the run has ended.

        Raises:
            MisconfigurationException: If a result depends on what another stage has.
        """
        if self._watch is None or self._paths is None:
            return
        _check(output, f"What the step returns on stage {self._run.stage}", self._watch)
        weight = self._paths.find(output)
        if weight is not None:
            raise MisconfigurationException(
                f"The loss depends on {weight} otherwise than through what the blocks return: by an attribute that a block sets, or by"
                " something that a hook keeps. The last stage has it of its own blocks alone. Let the blocks pass it on with the hidden state,"
                " leave it out of the loss, or train without PipelineParallel."
            )

    def _entering(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._run.order is not None:
            self._run.order.append(index)
        if self._paths is not None:
            self._paths.entering(self._names[index], module)
        if self._watch is not None:
            if index == 0 and self._run.begins_with_received:
                args, kwargs = with_hidden(args, kwargs, self._run.received)
            _check_arguments(self._names[index], module, args, kwargs, self._watch)
            self._watch.pause()

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._paths is not None:
            self._paths.leaving(output)
            self._paths.handed_on(logits_so_far())
        if self._watch is not None:
            self._watch.resume()

    def _check_log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        _check(value, f"The value of self.log({name!r})", self._watch)

    def _check_update(self, name: str, *args: Any, **kwargs: Any) -> None:
        _check((args, kwargs), f"An update of the metric {name}", self._watch)


@contextmanager
def _checked(owner: nn.Module, method: str, check: Callable[..., None]) -> Iterator[None]:
    """Has a method's arguments looked at before it runs."""
    own, original = vars(owner).get(method), getattr(owner, method, None)
    if original is None:
        yield
        return

    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return original(*args, **kwargs)

    object.__setattr__(owner, method, checked)
    try:
        yield
    finally:
        object.__delattr__(owner, method)
        if own is not None:
            object.__setattr__(owner, method, own)


def _check_arguments(name: str, module: nn.Module, args: Any, kwargs: Any, watch: Dependence) -> None:
    names = list(inspect.signature(module.forward).parameters)
    for index, value in enumerate(args):
        _check(value, f"The argument {names[index] if index < len(names) else index!r} of {name}", watch)
    for key, value in kwargs.items():
        _check(value, f"The argument {key} of {name}", watch)


def _check(value: Any, what: str, watch: Dependence | None) -> None:
    source = None if watch is None else watch.source_of_result(value)
    if source is not None:
        raise MisconfigurationException(
            f"{what} is computed from {source}, which is on another stage. Blocks of a model that is cut into stages get the"
            " hidden state from the block before, and all else from the batch; what comes behind them gets what they return. Let"
            " the blocks pass the value on with the hidden state; or, for a module that is used both before and after the blocks,"
            " name it in ParallelPlan(before=[...], after=[...])."
        )

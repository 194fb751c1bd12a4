"""What a part of a step has to run in when backward runs it again: what it ran in first, as the axes knew it then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

from lightning_5d.parallelism import Parallelized
from lightning_5d.recomputation import Call, Context


class RecomputeContexts:
    """The contexts of several axes, as one.

    Args:
        axes: The axes at work.

    Attributes:
        change: Whether some axis says something else at different points of a step.
    """

    def __init__(self, axes: Sequence[Parallelized] = ()) -> None:
        self.change = any(_overrides(axis, "recompute_context") for axis in axes)
        self._axes = [
            axis for axis in axes if _overrides(axis, "recompute_context") or _overrides(axis, "step_context")
        ]

    def now(self) -> Context:
        """What a part of the step that is about to run has to run in whenever it runs again; to be asked before its first run."""
        if not self.change:
            return self._steps
        makers = [axis.recompute_context() for axis in self._axes]
        return lambda: self._entered(makers)

    # [Note: recomputation of the user's own]
    # Models call `torch.utils.checkpoint.checkpoint` themselves, too, and torch runs their functions again in backward, outside of
    # whatever the step has run in. What an axis needs around them is entered by the function itself, the second time it runs.
    @contextmanager
    def of_others(self) -> Iterator[None]:
        """A context in which functions given to `torch.utils.checkpoint.checkpoint` run again in what they ran in first."""
        if not self.change:
            yield
            return
        # Private names, which `checkpoint` looks up in its module when it is called; checked with torch 2.13.
        generator, function = (
            torch_checkpoint._checkpoint_without_reentrant_generator,
            torch_checkpoint.CheckpointFunction,
        )

        def again(run: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(run, Call):  # which enters them itself
                run = _Again(run, self.now(), first=False)
            return generator(run, *args, **kwargs)

        class Reentrant:
            @staticmethod
            def apply(run: Any, *args: Any) -> Any:
                return function.apply(_Again(run, self.now(), first=True), *args)  # type: ignore[no-untyped-call]

        torch_checkpoint._checkpoint_without_reentrant_generator = again  # type: ignore[assignment]
        torch_checkpoint.CheckpointFunction = Reentrant  # type: ignore[assignment,misc]
        try:
            yield
        finally:
            torch_checkpoint._checkpoint_without_reentrant_generator = generator
            torch_checkpoint.CheckpointFunction = function  # type: ignore[misc]

    @contextmanager
    def _entered(self, makers: Sequence[Context]) -> Iterator[None]:
        with ExitStack() as stack:
            for make in makers:
                stack.enter_context(make())
            stack.enter_context(self.of_others())
            yield

    @contextmanager
    def _steps(self) -> Iterator[None]:
        with ExitStack() as stack:
            for axis in self._axes:
                stack.enter_context(axis.step_context())
            yield


class _Again:
    """A function in a context, the first time perhaps without it."""

    def __init__(self, run: Callable[..., Any], context: Context, *, first: bool) -> None:
        self._run, self._context, self._first = run, context, first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._first:
            self._first = False
            return self._run(*args, **kwargs)
        with self._context():
            return self._run(*args, **kwargs)


def _overrides(axis: Parallelized, hook: str) -> bool:
    return getattr(type(axis), hook) is not getattr(Parallelized, hook)

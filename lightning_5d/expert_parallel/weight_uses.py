"""A close look at the first step of each kind: whether the user's code uses weights of experts as if a rank had all of them.

A penalty on weights, a norm that is logged, the number of experts read off a shape: in a step these see the experts of one rank, and would
be something else without failing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from lightning_5d.expert_parallel.found import FoundExperts
from lightning_5d.pipeline_parallel.stage.run import StageBoundary
from lightning_5d.tensor_parallel.running import Running, calling_line
from lightning_5d.tensor_parallel.weight_uses import used_parameters

_SHAPES = (Tensor.shape.__get__, Tensor.size, Tensor.__len__)  # type: ignore[attr-defined]


class ExpertWeightUses:
    """The guard of one module.

    Args:
        module: The module.
        layers: Its experts, of which each rank has some.
        ranks: How many ranks have different ones, or parts.
    """

    def __init__(self, module: nn.Module, layers: Sequence[FoundExperts], ranks: int) -> None:
        self._module, self._layers, self._ranks = module, layers, ranks
        self._watched: set[str] = set()

    @contextmanager
    def watching(self, kind: str) -> Iterator[None]:
        """A context around a step's call; does nothing after the first one of its kind that ended well.

        Args:
            kind: What kind of step it is: ``"train"``, ``"validate"``, …, and of which stage.

        Raises:
            MisconfigurationException: From inside, at an operation on such a weight outside of its module.
        """
        if kind in self._watched:
            yield
            return
        watch = _Watch(self._layers, self._ranks)
        try:
            with ExitStack() as stack:
                stack.enter_context(watch.running.following(self._module, watch.apart))
                stack.enter_context(watch)
                yield
        except StageBoundary:  # a stage of a pipeline has come to its end
            self._watched.add(kind)
            raise
        self._watched.add(kind)


class _Watch(TorchFunctionMode):
    """Looks at one step."""

    def __init__(self, layers: Sequence[FoundExperts], ranks: int) -> None:
        super().__init__()
        self.running = Running()
        self._layers, self._ranks = layers, ranks

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and looks at it."""
        kwargs = kwargs or {}
        try:
            output = func(*args, **kwargs)
        except (RuntimeError, IndexError):  # such as an index of an expert that this rank has not
            for parameter in used_parameters(func, args, kwargs, torch.empty(0)):
                self._look(func, parameter)
            raise
        for parameter in used_parameters(func, args, kwargs, output):
            self._look(func, parameter)
        if func in _SHAPES and args and isinstance(args[0], nn.Parameter):
            self._look(func, args[0], output)
        return output

    def apart(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """What is compiled is not looked at."""

        def unwatched(*args: Any, **kwargs: Any) -> Any:
            # Private; checked with torch 2.13.
            watched = _get_current_function_mode() is self  # type: ignore[no-untyped-call]
            if not watched:
                return compiled(*args, **kwargs)
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            try:
                return compiled(*args, **kwargs)
            finally:
                self.__enter__()  # type: ignore[no-untyped-call]

        return unwatched

    def _look(self, func: Any, parameter: nn.Parameter, size: Any = None) -> None:
        for layer in self._layers:
            key = next((key for key in layer.stacked if layer.module._parameters[key] is parameter), None)
            if key is None:
                continue
            if size is not None:
                first = size[0] if isinstance(size, torch.Size) else size
                if first == layer.count or not isinstance(first, int):
                    return  # it is whole between steps, also where other layers' steps are
            if layer.name in self.running.names:
                return
            line = calling_line()
            if line is not None:
                raise MisconfigurationException(self._message(layer, key, func, size is not None, line))

    def _message(self, layer: FoundExperts, key: str, func: Any, size: bool, line: str) -> str:
        operation = "its shape" if size else getattr(func, "__name__", "an operation")
        name = f"{layer.name}.{key}" if layer.name else key
        text = (
            f"{name} has the weights of {layer.count} experts, spread over {self._ranks} ranks, and {self.running.place} uses it otherwise"
            f" than by calling {layer.name or type(layer.module).__name__}: {operation}, {line}. There it is what one rank has."
        )
        if size:
            return f"{text} Keep the number of experts as a number, such as {layer.name}.num_experts."
        return (
            f"{text} Call the module; write a penalty on weights as the optimizer's weight_decay, or add its gradient in"
            " on_before_optimizer_step, where weights and gradients are DTensors; or leave ExpertParallel out."
        )

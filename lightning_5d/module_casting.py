"""Module casting: modules compute in 16 bits, whatever is outside of them in fp32.

The 16-bit copies of weights are made by whoever shards them. What is left to do here are activations: a module with weights
gets its floating-point inputs in their dtype, and what leaves the outermost module call of a step comes back in fp32, so that
a loss that the step computes by itself is an fp32 loss, even where the head belongs to no block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.utils import _apply_to_tensors  # torch 2.13: what FSDP2 casts with; leaves caches as they are
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from lightning_5d.whole_length import marked_like

_HALF = (torch.float16, torch.bfloat16)


def keeps_full_precision(module: nn.Module) -> bool:
    """Whether a module's own weights stay in fp32.

    Normalization with running statistics, which are fp32: PyTorch's kernels take 16-bit inputs there, but weights of the
    statistics' dtype only. And what a parametrization (spectral norm, weight norm) makes a weight of. And modules that say so
    themselves, by an attribute ``full_precision``, as routers do: they take inputs of any dtype.
    """
    return isinstance(module, nn.modules.batchnorm._NormBase | ParametrizationList) or (
        getattr(module, "full_precision", False) is True
    )


class ModuleCasting:
    """Casts activations of one module tree; `remove` undoes it.

    Args:
        root: The LightningModule. Its own inputs, the batch, are left alone: targets keep their precision.
        blocks: The blocks inside it. Calls further inside them are never outermost, so nothing is hooked for that there
            and a compiled block stays whole.
        dtype: What modules compute in.
    """

    def __init__(self, root: nn.Module, blocks: Iterable[nn.Module], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._depth = 0
        self._active = False
        self._handles: list[RemovableHandle] = []
        blocks = list(blocks)
        inside = {id(inner) for block in blocks for inner in block.modules() if inner is not block}
        is_block = {id(block) for block in blocks}
        for module in root.modules():
            owns = any(p is not None and p.is_floating_point() and p.ndim for p in module._parameters.values())
            if module is not root and (owns or id(module) in is_block) and not keeps_full_precision(module):
                self._handles.append(module.register_forward_pre_hook(self._cast_inputs, with_kwargs=True))
            if id(module) not in inside and any(True for _ in module.parameters()):
                # Exceptions included (`always_call`): a step that catches one must not stay inside for ever.
                self._handles.append(module.register_forward_pre_hook(self._enter))
                self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step: what leaves outermost module calls is cast to fp32."""
        before, self._active, self._depth = self._active, True, 0
        try:
            yield
        finally:
            self._active = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around a backward inside a step, which may run modules again: those calls are inner ones."""
        before, self._active = self._active, False
        try:
            yield
        finally:
            self._active = before

    def remove(self) -> None:
        """Takes all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _cast_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not kwargs and all(isinstance(arg, Tensor) and arg.dtype == self._dtype for arg in args):
            return None  # as most calls inside a block
        return _apply_to_tensors(self._narrow, args), _apply_to_tensors(self._narrow, kwargs)

    def _narrow(self, tensor: Tensor) -> Tensor:
        # A number on its own is no activation: it may be a loss that is handed on from block to block, and makes nothing it meets wider.
        return tensor.to(self._dtype) if tensor.is_floating_point() and tensor.ndim else tensor

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._active:
            self._depth += 1

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._active:
            return None
        self._depth = max(self._depth - 1, 0)
        return None if self._depth else _apply_to_tensors(_widen, output)


def _widen(tensor: Tensor) -> Tensor:
    return marked_like(tensor.float(), tensor) if tensor.dtype in _HALF else tensor

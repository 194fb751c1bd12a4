"""Who holds memory: parameters, gradients, optimizer states, and what the axes keep outside the module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_5d.memory.categories import COMMUNICATION, ELSEWHERE, GRADIENTS, WEIGHTS, optimizer_category
from lightning_5d.parallelism import Parallelized


def held(module: nn.Module, optimizers: Iterable[Any], axes: Iterable[Parallelized]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that somebody answers for, with its category.

    Of two claims to one storage the later one here never displaces the earlier: the axes know better than the module
    which of its parameters are master weights.

    Args:
        module: The user's module.
        optimizers: Its optimizers, Lightning's or torch's.
        axes: The axes at work, if any. Their communication buffers are left out, see `pools`.
    """
    for axis in axes:
        for category, tensor in axis.memory():
            if category != COMMUNICATION:
                yield category, tensor
    inner = [_plain_optimizer(optimizer) for optimizer in optimizers]
    parameters = [*module.parameters(), *(p for o in inner for group in o.param_groups for p in group["params"])]
    for parameter in parameters:
        yield WEIGHTS, parameter
        if parameter.grad is not None:
            yield GRADIENTS, parameter.grad
    for optimizer in inner:
        for state in optimizer.state.values():
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor):
                    yield optimizer_category(name), value


def pools(axes: Iterable[Parallelized], device_type: str) -> dict[int, int]:
    """The memory that exchanges keep for reuse: bytes by address."""
    return _by_address(axes, device_type, COMMUNICATION)


def elsewhere(axes: Iterable[Parallelized], device_type: str) -> dict[int, int]:
    """The memory of other ranks that exchanges read in place: bytes by address."""
    return _by_address(axes, device_type, ELSEWHERE)


def _by_address(axes: Iterable[Parallelized], device_type: str, category: str) -> dict[int, int]:
    return {
        tensor.data_ptr(): tensor.untyped_storage().nbytes()
        for axis in axes
        for of, tensor in axis.memory()
        if of == category and tensor.device.type == device_type
    }


def _plain_optimizer(optimizer: Any) -> Optimizer:
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner

"""Copies of tensors that may have to be put back as they were."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_5d.gradients import values_of

_PLAIN = (Tensor, int, float, complex, str, type(None))


class Pool:
    """Memory for copies, used again from step to step."""

    def __init__(self) -> None:
        self._free: dict[tuple[Any, ...], list[Tensor]] = {}

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of dense tensors, in memory that is theirs until `give_back`."""
        copies = []
        for tensor in tensors:
            free = self._free.get(_kind(tensor))
            copies.append(free.pop() if free else torch.empty_like(tensor))
        if copies:
            torch._foreach_copy_(copies, list(tensors))
        return copies

    def give_back(self, copies: Iterable[Tensor]) -> None:
        """Takes memory back."""
        for copy in copies:
            self._free.setdefault(_kind(copy), []).append(copy)


class Snapshot:
    """Tensors, and the mappings that hold them, as they are now.

    Args:
        mappings: Mappings of names to tensors or other values. Both which values they have, and what is in the tensors, is kept.
        tensors: Further tensors.
        pool: Where memory comes from; fresh memory if ``None``.
    """

    @torch.no_grad()
    def __init__(
        self, mappings: Iterable[MutableMapping[Any, Any]], tensors: Iterable[Tensor] = (), pool: Pool | None = None
    ) -> None:
        self._mappings = [
            (mapping, {key: value if isinstance(value, _PLAIN) else deepcopy(value) for key, value in mapping.items()})
            for mapping in mappings
        ]
        held = [value for _, kept in self._mappings for value in kept.values() if isinstance(value, Tensor)]
        distinct = {id(tensor): tensor for tensor in (*held, *tensors) if not tensor.is_meta}
        self._tensors = [values_of(tensor.detach()) for tensor in distinct.values()]
        self._pool = pool or Pool()
        self._copies = self._pool.take(self._tensors)

    @classmethod
    def of_buffers(cls, module: nn.Module) -> Snapshot:
        """The buffers of a module and of all modules in it."""
        return cls([each._buffers for each in module.modules() if each._buffers])

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back."""
        for mapping, kept in self._mappings:
            mapping.clear()
            mapping.update(kept)
        if self._copies:
            torch._foreach_copy_(self._tensors, self._copies)

    def free(self) -> None:
        """Gives its memory back."""
        self._pool.give_back(self._copies)
        self._mappings, self._tensors, self._copies = [], [], []


class OptimizerSnapshot:
    """The parameters of an optimizer and its states, as they are now.

    Args:
        optimizer: A torch optimizer.
        pool: Where memory comes from.
    """

    def __init__(self, optimizer: Any, pool: Pool) -> None:
        self._optimizer = optimizer
        self._known = set(optimizer.state)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        entries = [entry for entry in optimizer.state.values() if isinstance(entry, MutableMapping)]
        self._all = Snapshot(entries, parameters, pool)

    def restore(self) -> None:
        """Puts everything back; states that the optimizer has made since are gone."""
        for key in [key for key in self._optimizer.state if key not in self._known]:
            del self._optimizer.state[key]
        self._all.restore()

    def free(self) -> None:
        """Gives its memory back."""
        self._all.free()


class GradientSnapshot:
    """The gradients of some parameters, as they are now.

    Args:
        parameters: The parameters.
        pool: Where memory comes from.
    """

    @torch.no_grad()
    def __init__(self, parameters: Iterable[Tensor], pool: Pool) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.grad is not None]
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        self._made = [_maker(grad) for grad in grads]
        self._pool = pool
        self._copies = pool.take([values_of(grad) for grad in grads])

    @torch.no_grad()
    def restore(self) -> list[Tensor]:
        """Puts them back; returns the parameters that had none any more."""
        cleared = []
        for parameter, make, copy in zip(self._parameters, self._made, self._copies, strict=True):
            if parameter.grad is None:
                parameter.grad = make(copy)
                cleared.append(parameter)
            else:
                values_of(parameter.grad).copy_(copy)
        return cleared

    def free(self) -> None:
        """Gives their memory back."""
        self._pool.give_back(self._copies)
        self._parameters, self._made, self._copies = [], [], []


def _maker(grad: Tensor) -> Any:
    """Makes a gradient like this one from its values on this rank."""
    if isinstance(grad, DTensor):
        mesh, placements, shape, stride = grad.device_mesh, grad.placements, grad.shape, grad.stride()
        return lambda values: DTensor.from_local(values, mesh, placements, run_check=False, shape=shape, stride=stride)
    if grad.layout == torch.sparse_coo:
        indices, shape = grad.coalesce().indices(), grad.shape
        return lambda values: torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True)
    return lambda values: values


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device

"""Gradients of which each rank of the tensor axis has a summand, made complete."""

# [Note: partial gradients]
# What a rank computes of the gradient of a weight that it holds whole is only a part where the weight is used on a piece of its
# input: on some heads inside a region, on some of the sequence between them. Copies of key and value heads get the gradients of
# their own rank's queries. All of these are added up in one exchange, once per step, after the data ranks have added up theirs:
# then they are shards of them, and what hooks, norms, clipping and logs read is complete.
# An exchange must not count a gradient that an earlier one has completed and nobody has cleared: before a backward adds to such
# gradients all ranks but the first that holds it set theirs to zero. The sum then is exact, on however many ranks.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_5d.gradients import give_gradient, values_of
from lightning_5d.names import plain_name
from lightning_5d.tensor_parallel.axis import TensorAxis
from lightning_5d.tensor_parallel.layout import TensorLayout


@dataclass
class _Weight:
    """A parameter whose gradient is a sum over ranks.

    Attributes:
        owner: A module that has it, under the name `key`.
        key: That name.
        copies: So many neighbouring ranks add theirs up.
        parameter: As it is between steps; during one the module may have another in its place.
    """

    owner: nn.Module
    key: str
    copies: int
    parameter: Tensor


class PartialGradients:
    """Completes the gradients of a module's weights over the tensor axis.

    All ranks of the axis call its methods together, between steps of the same module.

    Args:
        module: With its parameters placed and sharded, and not in use.
        layout: Which gradients are partial.
        axis: The ranks.
        device: Where they exchange; gradients may rest elsewhere.
    """

    def __init__(self, module: nn.Module, layout: TensorLayout, axis: TensorAxis, device: torch.device) -> None:
        self._axis, self._device = axis, device
        self._weights = list(_weights(module, layout, axis.size))
        self._complete = True

    def refresh(self) -> None:
        """To be called between steps: parameters may have been replaced, as loading with ``assign=True`` does."""
        for weight in self._weights:
            present = weight.owner._parameters[weight.key]
            if isinstance(present, DTensor):
                weight.parameter = present

    def begin(self) -> None:
        """To be called before a backward adds to gradients."""
        if not self._complete:
            return
        self._complete = False
        for weight in self._weights:
            if self._axis.rank % weight.copies and weight.parameter.grad is not None:
                values_of(weight.parameter.grad).zero_()

    @torch.no_grad()
    def complete(self) -> None:
        """To be called when the gradients of a window are there, and reduced over the data ranks.

        A rank without gradient counts as zero and gets the sum; where none has one, there is none after it.
        """
        if self._complete:
            return
        self._complete = True
        weights = [weight for weight in self._weights if weight.parameter.requires_grad]
        if not weights:
            return
        places = _Places(weights, self._axis.rank, self._axis.size, self._device)
        total = self._axis.sum(places.flat)
        for weight, mine in zip(weights, places.taken(total), strict=True):
            if mine is not None:
                give_gradient(weight.parameter, mine)

    def drop(self) -> None:
        """Forgets a window that has failed, with its gradients."""
        self._complete = True


class _Places:
    """Where the gradients of some weights are in what all ranks add up.

    For each weight there are as many places as there are different parts of it, one for every ``copies`` ranks; a rank has
    zeros in those of others. Behind them is, for each place, how many ranks have a gradient.
    """

    def __init__(self, weights: Sequence[_Weight], rank: int, size: int, device: torch.device) -> None:
        locals_ = [values_of(weight.parameter) for weight in weights]
        self._sizes = [local.numel() for local in locals_]
        self._parts = [size // weight.copies for weight in weights]
        self._own = [rank // weight.copies for weight in weights]
        dtype = torch.float64 if any(local.dtype == torch.float64 for local in locals_) else torch.float32
        numel = sum(n * parts for n, parts in zip(self._sizes, self._parts, strict=True))
        self.flat = torch.zeros(numel + sum(self._parts), dtype=dtype, device=device)
        for weight, place, used in zip(weights, self._places(self.flat), self._used(self.flat), strict=True):
            if weight.parameter.grad is not None:
                place.copy_(values_of(weight.parameter.grad).reshape(-1))
                used.fill_(1.0)

    def taken(self, total: Tensor) -> list[Tensor | None]:
        """This rank's part of each sum; ``None`` where no rank had a gradient."""
        used = torch.stack(self._used(total)).tolist()
        return [place if is_used else None for place, is_used in zip(self._places(total), used, strict=True)]

    def _places(self, flat: Tensor) -> list[Tensor]:
        found, start = [], 0
        for numel, parts, own in zip(self._sizes, self._parts, self._own, strict=True):
            found.append(flat[start + own * numel : start + (own + 1) * numel])
            start += numel * parts
        return found

    def _used(self, flat: Tensor) -> list[Tensor]:
        found, start = [], len(flat) - sum(self._parts)
        for parts, own in zip(self._parts, self._own, strict=True):
            found.append(flat[start + own])
            start += parts
        return found


def _weights(module: nn.Module, layout: TensorLayout, size: int) -> Iterator[_Weight]:
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        for key, parameter in owner._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            name = plain_name(f"{prefix}.{key}" if prefix else key)
            rows = layout.weights.get(name)
            copies = size if name in layout.partial else 1 if rows is None else rows.copies
            if copies > 1:
                seen.add(id(parameter))
                yield _Weight(owner, key, copies, parameter)

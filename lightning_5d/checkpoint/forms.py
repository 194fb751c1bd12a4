"""Weights that ranks store in another form than a checkpoint has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lightning_5d.names import plain_name
from lightning_5d.parallelism import StoredForm


@dataclass(frozen=True)
class Formed:
    """A stored tensor together with its form: a weight, its gradient, or a state that an optimizer has for each element."""

    stored: Tensor
    form: StoredForm

    @property
    def shape(self) -> torch.Size:
        """That of the whole tensor."""
        return self.form.whole_shape(self.stored.shape)

    @property
    def dtype(self) -> torch.dtype:
        """That of both."""
        return self.stored.dtype


@dataclass(frozen=True)
class Forms:
    """The forms of a module's weights.

    Attributes:
        by_name: Those of weights that are not stored as they are in a checkpoint, by plain name.
    """

    by_name: Mapping[str, StoredForm] = field(default_factory=dict)

    def marked(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Values by the name of their weight, those with a form together with it."""
        return {
            name: value if form is None or not isinstance(value, Tensor) else Formed(value, form)
            for name, value in named.items()
            for form in [self.by_name.get(plain_name(name))]
        }

    def marked_state(self, optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
        """An optimizer's state dict, in which states of a weight with a form come together with it."""
        state: dict[str, Any] = optimizer.state_dict()
        forms = self.by_parameter(module)
        if not forms:
            return state
        entries = dict(state["state"])
        for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
            for index, parameter in zip(saved["params"], group["params"], strict=True):
                form = forms.get(id(parameter))
                if form is not None and index in entries:
                    entries[index] = {
                        key: Formed(value, form) if is_elementwise(key, value, parameter.shape) else value
                        for key, value in entries[index].items()
                    }
        return {**state, "state": entries}

    def by_parameter(self, module: nn.Module) -> dict[int, StoredForm]:
        """The same by the ids of a module's parameters."""
        if not self.by_name:
            return {}
        return {
            id(parameter): self.by_name[plain]
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if (plain := plain_name(name)) in self.by_name
        }


def is_elementwise(key: str, value: Any, shape: torch.Size) -> bool:
    """Whether an entry of an optimizer's state is a tensor of its parameter's shape, such as momentum."""
    # A scalar parameter's moments have the shape of a step count, which torch's optimizers always call "step".
    return key != "step" and isinstance(value, Tensor) and value.shape == shape


def whole_tensor(value: Tensor | Formed) -> Tensor:
    """The whole tensor, as a checkpoint has it, of a sharded one; all ranks that hold shards of it call it."""
    if isinstance(value, Formed):
        return value.form.restore(whole_tensor(value.stored))
    if not isinstance(value, DTensor):
        return value
    if not value.numel():
        # Checked with torch 2.13: gathering fails where the ranks do not divide the first dimension.
        return torch.empty(value.shape, dtype=value.dtype)
    # One axis at a time, in the reverse of the order in which they were cut, or torch warns of every weight that is over
    # several: FSDP2 cuts what another axis has cut before, and says so by a placement of its own (private, torch 2.13).
    found, placed = value, list(value.placements)
    with torch.no_grad():
        while cut := [dim for dim, placement in enumerate(placed) if not placement.is_replicate()]:
            strided = [dim for dim in cut if not placed[dim].is_shard() and not placed[dim].is_partial()]
            placed[strided[0] if strided else cut[-1]] = Replicate()
            found = found.redistribute(placements=placed)
        return found.to_local()

"""Parameters without dimensions, which FSDP2 refuses: replicated, and reduced together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate


class ScalarParams:
    """Keeps 0-dim parameters as replicated DTensors for the optimizer and as plain ones while the module computes.

    So an optimizer sees DTensors only (the fused ones refuse a mix), and the forward sees plain tensors only. Both share
    one storage. Gradients are averaged over ``axes`` in one small all-reduce.
    """

    def __init__(self, module: nn.Module, params: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
        self._places: list[list[tuple[nn.Module, str]]] = []
        self.sharded: list[nn.Parameter] = []
        self.plain: list[nn.Parameter] = []
        for param in params:
            places = [
                (owner, name)
                for owner in module.modules()
                for name, candidate in owner._parameters.items()
                if candidate is param
            ]
            local, over = param.detach(), mesh
            if isinstance(param, DTensor):
                # As FSDP2 does (torch 2.13), since optimizers refuse tensors of several meshes.
                local, over = param.to_local().detach(), DeviceMesh._concatenate([mesh, param.device_mesh])
            replicated = DTensor.from_local(local, over, [Replicate()] * over.ndim, run_check=False)
            self._places.append(places)
            self.sharded.append(nn.Parameter(replicated, requires_grad=param.requires_grad))
            self.plain.append(nn.Parameter(local, requires_grad=param.requires_grad))
        self._computing = True
        self.to_sharded()

    def to_sharded(self) -> None:
        """Puts the DTensors into the module."""
        if self._computing:
            self._register(self.sharded)
            self._computing = False

    def to_plain(self) -> None:
        """Puts plain tensors into the module, with the present values."""
        if self._computing:
            return
        for index, ((owner, name), *_) in enumerate(self._places):
            param = owner._parameters[name]
            if param is not None and param is not self.sharded[index]:
                self.sharded[index] = param  # replaced, as to_empty() and load_state_dict(assign=True) do
            plain, sharded = self.plain[index], self.sharded[index]
            local = sharded.data.to_local()  # type: ignore[attr-defined]
            if plain.device != local.device:  # it was on the meta device
                plain = self.plain[index] = nn.Parameter(local)
            plain.data = local
            plain.requires_grad_(sharded.requires_grad)
        self._register(self.plain)
        self._computing = True

    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Each plain parameter with its DTensor, while the module has the plain ones; else nothing."""
        return list(zip(self.plain, self.sharded, strict=True)) if self._computing else []

    def used(self) -> list[bool]:
        """Which parameters have a gradient that was not reduced yet."""
        return [plain.grad is not None for plain in self.plain]

    def drop_gradients(self) -> None:
        """Forgets gradients that were not reduced."""
        for plain in self.plain:
            plain.grad = None

    @torch.no_grad()
    def reduce(self, used: Sequence[bool], axes: Sequence[DeviceMesh]) -> None:
        """Averages the gradients of those parameters that some rank ``used``, and hands them to the DTensors."""
        chosen = [index for index, is_used in enumerate(used) if is_used]
        if not chosen:
            return
        grads = [self.plain[index].grad for index in chosen]
        device = self.plain[chosen[0]].device
        flat = torch.tensor([0.0 if grad is None else grad.item() for grad in grads], dtype=torch.float64)
        flat = flat.to(device=device, dtype=torch.float32 if device.type == "mps" else torch.float64)
        for axis in axes:
            dist.all_reduce(flat, group=axis.get_group())
            flat /= axis.size()
        for index, mean in zip(chosen, flat, strict=True):
            self.plain[index].grad = None
            sharded = self.sharded[index]
            local = mean.to(sharded.dtype).clone()
            if sharded.grad is None:
                over = sharded.device_mesh  # type: ignore[attr-defined]
                sharded.grad = DTensor.from_local(local, over, [Replicate()] * over.ndim, run_check=False)
            else:
                sharded.grad.to_local().add_(local)  # type: ignore[attr-defined]

    def _register(self, params: Sequence[nn.Parameter]) -> None:
        for param, places in zip(params, self._places, strict=True):
            for owner, name in places:
                owner._parameters[name] = param

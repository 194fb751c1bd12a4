"""Choosing and making the engine for a module, a mesh and a stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_5d.data_parallel.blocks import Blocks, cut
from lightning_5d.data_parallel.engine import Engine, ReplicatedEngine
from lightning_5d.data_parallel.exchange import Exchange
from lightning_5d.data_parallel.options import ShardOptions
from lightning_5d.data_parallel.param_group import state_of
from lightning_5d.data_parallel.scalars import ScalarParams
from lightning_5d.data_parallel.scheduled import SchedulingEngine
from lightning_5d.data_parallel.traffic import Traffic
from lightning_5d.data_parallel.transports import open_transport
from lightning_5d.module_casting import keeps_full_precision


def shard(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    options: ShardOptions | None = None,
) -> Engine:
    """Spreads a module over the data ranks of ``mesh``, in place; names of modules and parameters do not change.

    Args:
        module: The root. Its ``forward`` must run around every training and validation step.
        blocks: Submodules to gather and reduce one at a time (the layers of a transformer). May be empty.
        mesh: One axis (shard) or two (replicate, shard); may be a part of a larger mesh. Parameters may be DTensors over
            another axis of that: then they are over both, and plain tensors of this rank's part while the module computes.
        options: Stage, precision and offload; see :class:`ShardOptions`.

    Returns:
        The engine that the training loop calls: ``begin`` before a microbatch, ``wait`` before reading gradients.

    Raises:
        ValueError: If the mesh has no or more than two axes, or a block is not inside ``module``.
    """
    options = options or ShardOptions()
    # Weights of the tensor axis: at rest they are DTensors over it, and only FSDP2's groups show plain ones in between.
    spread = any(isinstance(parameter, DTensor) for parameter in module.parameters())
    if mesh.ndim not in (1, 2):
        raise ValueError(f"The data mesh has {mesh.ndim} axes; give one (shard) or two (replicate, shard).")
    mixed = options.mp_policy is not None and options.mp_policy.param_dtype is not None
    # Apart, as the parameters of one group are reduced together, and on GPUs only if their gradients have one dtype.
    whole = [part for part in module.modules() if mixed and part is not module and keeps_full_precision(part)]
    cuts = cut(module, [*blocks, *whole])
    axes = _axes(mesh)
    if not any(True for _ in module.parameters()):  # a stage of a pipeline that holds only what has no weights
        return Engine(module, options)
    if options.synchronize and axes:
        for axis in axes:
            broadcast_from_first(module, axis.get_group())
    if not axes and not mixed and not spread and options.offload == "none":
        return Engine(module, options)
    gloo = mesh.device_type == "cpu"
    if options.stage == 0 and gloo and not mixed and not spread:
        return ReplicatedEngine(module, options, open_transport(_flat_group(mesh, axes), options.shared_memory))
    return _shard_with_fsdp2(module, cuts, mesh, axes, options, gloo)


def _shard_with_fsdp2(
    module: nn.Module, cuts: Blocks, mesh: DeviceMesh, axes: list[DeviceMesh], options: ShardOptions, gloo: bool
) -> Engine:
    settings: dict[str, Any] = {"mp_policy": options.mp_policy or MixedPrecisionPolicy()}
    apply: Callable[..., Any]
    if options.stage == 0:
        apply = replicate
        settings["mesh"] = mesh if mesh.ndim == 1 else mesh._flatten()
        axes = [settings["mesh"]] if settings["mesh"].size() > 1 else []
        shard_axis, replicate_axis = None, axes[0] if axes else None
    else:
        apply = fully_shard
        settings["mesh"] = mesh if len(axes) == 2 or mesh.ndim == 1 else mesh[_names(mesh)[1]]
        settings["reshard_after_forward"] = options.stage == 3
        if options.offload != "none":
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=not gloo)
        shard_axis, replicate_axis = _roles(mesh, axes)
    scalars = [param for param in module.parameters() if param.ndim == 0]
    for param in module.parameters():
        if not param.is_contiguous():  # channels_last, for one: FSDP2 refuses it; values stay the same
            param.data = param.data.contiguous()
    for block in cuts.modules:
        policy = MixedPrecisionPolicy() if keeps_full_precision(block) else settings["mp_policy"]
        apply(block, **{**settings, "mp_policy": policy}, ignored_params=cuts.left_to_root | set(scalars))
    if options.stage != 0:
        settings["reshard_after_forward"] = False
    apply(module, **settings, ignored_params=set(scalars))
    scalar_params = ScalarParams(module, scalars, settings["mesh"]) if scalars else None
    exchange = None
    if gloo:
        exchange = Exchange(
            shard=open_transport(shard_axis.get_group(), options.shared_memory) if shard_axis is not None else None,
            replicate=open_transport(replicate_axis.get_group(), options.shared_memory) if replicate_axis else None,
            traffic=Traffic(),
            keep_unsharded=options.stage < 3,
        )
    order = {id(inner): position for position, inner in enumerate(module.modules())}
    states = [state_of(module)] + [state_of(b) for b in sorted(cuts.modules, key=lambda block: order[id(block)])]
    return SchedulingEngine(module, options, states, axes, exchange, scalar_params)


def _axes(mesh: DeviceMesh) -> list[DeviceMesh]:
    """The one-dimensional meshes of those axes that have more than one rank."""
    if mesh.ndim == 1:
        return [mesh] if mesh.size() > 1 else []
    return [mesh[name] for name in _names(mesh) if mesh[name].size() > 1]


def _roles(mesh: DeviceMesh, axes: list[DeviceMesh]) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Which axis shards and which replicates."""
    if mesh.ndim == 1:
        return (axes[0] if axes else None), None
    replicate_name, shard_name = _names(mesh)
    by_name = {name: axis for axis in axes for name in _names(axis)}
    return by_name.get(shard_name), by_name.get(replicate_name)


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    if mesh.mesh_dim_names is None:
        raise ValueError("The axes of a two-dimensional data mesh need names: (replicate, shard).")
    return mesh.mesh_dim_names


def _flat_group(mesh: DeviceMesh, axes: list[DeviceMesh]) -> dist.ProcessGroup:
    return axes[0].get_group() if len(axes) == 1 else mesh._flatten().get_group()


@torch.no_grad()
def broadcast_from_first(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Gives every rank of ``group`` the parameters and buffers of its first rank. Meta tensors are left alone."""
    for tensor in (*module.parameters(), *module.buffers()):
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        if local.device.type == "meta":
            continue
        sent = local.contiguous()
        dist.broadcast(sent, group_src=0, group=group)
        if sent.data_ptr() != local.data_ptr():
            local.copy_(sent)

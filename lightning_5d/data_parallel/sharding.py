"""Choosing and making the engine for a module, a mesh and a stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_5d.data_parallel.apart import evenly, modules_apart
from lightning_5d.data_parallel.blocks import Blocks, cut
from lightning_5d.data_parallel.engine import Engine, ReplicatedEngine
from lightning_5d.data_parallel.exchange import Exchange
from lightning_5d.data_parallel.options import ShardOptions
from lightning_5d.data_parallel.peers import Spread
from lightning_5d.data_parallel.scalars import ScalarParams
from lightning_5d.data_parallel.scheduled import SchedulingEngine
from lightning_5d.data_parallel.states import state_of
from lightning_5d.data_parallel.traffic import Traffic
from lightning_5d.data_parallel.transports import open_transport
from lightning_5d.mesh import ExpertView
from lightning_5d.module_casting import keeps_full_precision


def shard(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    options: ShardOptions | None = None,
    views: Sequence[ExpertView] = (),
) -> Engine:
    """Spreads a module over the data ranks of ``mesh``, in place; names of modules and parameters do not change.

    Args:
        module: The root. Its ``forward`` must run around every training and validation step.
        blocks: Submodules to gather and reduce one at a time (the layers of a transformer). May be empty.
        mesh: One axis (shard) or two (replicate, shard); may be a part of a larger mesh. Parameters may be DTensors over
            another axis of that: then they are over both, and plain tensors of this rank's part while the module computes.
        options: Stage, precision and offload; see :class:`ShardOptions`.
        views: Other arrangements of the ranks. Parameters that are DTensors over one of them are spread over its ``shard_mesh``, each
            module of them on its own, and sums of their gradients are divided by its ``data_size``. All ranks give the same.

    Returns:
        The engine that the training loop calls: ``begin`` before a microbatch, ``wait`` before reading gradients.

    Raises:
        ValueError: If the mesh has no or more than two axes, a block is not inside ``module``, or a module has weights of a view
            together with others.
    """
    options = options or ShardOptions()
    # Weights of the tensor axis: at rest they are DTensors over it, and only FSDP2's groups show plain ones in between.
    placed = any(isinstance(parameter, DTensor) for parameter in module.parameters())
    # Of all views, as making one may take all ranks, and some may hold no weights of it.
    spread = Spread.over(mesh, options.stage)
    spreads = {id(view): Spread.over(view.shard_mesh, options.stage, view.data_size) for view in views}
    apart = {part: spreads[id(view)] for part, view in modules_apart(module, views).items()}
    mixed = options.mp_policy is not None and options.mp_policy.param_dtype is not None
    # Apart, as the parameters of one group are reduced together, and on GPUs only if their gradients have one dtype.
    whole = [part for part in module.modules() if mixed and part is not module and keeps_full_precision(part)]
    cuts = cut(module, [*blocks, *whole, *apart])
    if not any(True for _ in module.parameters()):  # a stage of a pipeline that holds only what has no weights
        return Engine(module, options)
    if options.synchronize:
        _synchronize(module, spread, apart)
    if not spread.axes and not mixed and not placed and options.offload == "none":
        return Engine(module, options)
    gloo = mesh.device_type == "cpu"
    if options.stage == 0 and gloo and not mixed and not placed:
        group = spread.mesh.get_group()
        return ReplicatedEngine(module, options, open_transport(group, options.shared_memory))
    return _shard_with_fsdp2(module, cuts, spread, apart, options, gloo)


def _shard_with_fsdp2(
    module: nn.Module,
    cuts: Blocks,
    spread: Spread,
    apart: Mapping[nn.Module, Spread],
    options: ShardOptions,
    gloo: bool,
) -> Engine:
    settings: dict[str, Any] = {}
    apply: Callable[..., Any] = replicate
    if options.stage != 0:
        apply = fully_shard
        settings["reshard_after_forward"] = options.stage == 3
        if options.offload != "none":
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=not gloo)
    scalars = [param for param in module.parameters() if param.ndim == 0]
    for param in module.parameters():
        if not param.is_contiguous():  # channels_last, for one: FSDP2 refuses it; values stay the same
            param.data = param.data.contiguous()
    for block in cuts.modules:
        policy = None if keeps_full_precision(block) else options.mp_policy
        cutting = {"shard_placement_fn": evenly(apart[block])} if block in apart and options.stage != 0 else {}
        apply(
            block,
            **settings,
            **cutting,
            mesh=apart.get(block, spread).mesh,
            mp_policy=policy or MixedPrecisionPolicy(),
            ignored_params=cuts.left_to_root | set(scalars),
        )
    if options.stage != 0:
        settings["reshard_after_forward"] = False
    policy = options.mp_policy or MixedPrecisionPolicy()
    apply(module, **settings, mesh=spread.mesh, mp_policy=policy, ignored_params=set(scalars))
    scalar_params = ScalarParams(module, scalars, spread.mesh) if scalars else None
    peers = {
        id(each): each.peers(transports=gloo, shared_memory=options.shared_memory) for each in (spread, *apart.values())
    }
    exchange = None
    if gloo:
        exchange = Exchange(list(peers.values()), Traffic(), keep_unsharded=options.stage < 3)
    order = {id(inner): position for position, inner in enumerate(module.modules())}
    parts = [module, *sorted(cuts.modules, key=lambda block: order[id(block)])]
    states = [(state_of(part), peers[id(apart.get(part, spread))]) for part in parts]
    return SchedulingEngine(module, options, states, exchange, scalar_params)


def _synchronize(module: nn.Module, spread: Spread, apart: Mapping[nn.Module, Spread]) -> None:
    elsewhere = {parameter: each for part, each in apart.items() for parameter in part.parameters(recurse=False)}
    usual = [parameter for parameter in module.parameters() if parameter not in elsewhere]
    for axis in spread.axes:
        broadcast_from_first([*usual, *module.buffers()], axis.get_group())
    for parameter, each in elsewhere.items():
        for axis in each.axes:
            broadcast_from_first([parameter], axis.get_group())


@torch.no_grad()
def broadcast_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Gives every rank of ``group`` the values of its first rank. Meta tensors are left alone."""
    for tensor in tensors:
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        if local.device.type == "meta":
            continue
        sent = local.contiguous()
        dist.broadcast(sent, group_src=0, group=group)
        if sent.data_ptr() != local.data_ptr():
            local.copy_(sent)

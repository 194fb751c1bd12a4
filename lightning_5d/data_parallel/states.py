"""FSDP2's states of modules, whose parameter groups become this package's own.

Knows the private parts of FSDP2's states, as `param_group` does those of their groups; checked with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state

from lightning_5d.data_parallel.exchange import Exchange
from lightning_5d.data_parallel.hooks_aside import hide_operations
from lightning_5d.data_parallel.param import keep, show_plain
from lightning_5d.data_parallel.param_group import ExchangingParamGroup, RecordingParamGroup
from lightning_5d.data_parallel.peers import Peers


def adopt(state: FSDPState, peers: Peers, exchange: Exchange | None) -> list[RecordingParamGroup]:
    """Makes the parameter groups of one FSDP2 state ours; with an ``exchange`` they gather and reduce among ``peers`` through it.

    States must be adopted in the order of their forward, the root first. Groups whose tensors bring their own gather
    (``fsdp_pre_all_gather``, as in float8 training) keep FSDP2's collectives.
    """
    ids = {state._pre_forward_hook_handle.id, state._post_forward_hook_handle.id}
    groups: list[Any] = state._fsdp_param_groups
    hide_operations(((module, ids) for module in state._modules), partial(_has_work, state, groups))
    for group in groups:
        own_gather = any(hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather") for param in group.fsdp_params)
        for param in group.fsdp_params:
            if param.is_dtensor:
                show_plain(param)
        group.used, group.fresh, group.reductions = set(), set(), 0
        group.holding = group.pinned = group.compare_all = group.exposed = False
        group._full_versions = []
        if exchange is None or own_gather:
            group.__class__ = RecordingParamGroup
            group.reduce_scatter_unused_params = True
            if peers.divide_by != peers.count:
                # In the place of an all-reduce of the user's, right after the mean over its ranks. Its `gradient_divide_factor`
                # divides twice where it adds up in fp16 over one rank, or replicates.
                group._all_reduce_hook = peers.correct_mean
            continue
        group.__class__ = ExchangingParamGroup
        group.exchange, group.peers, group.index = exchange, peers, len(exchange.groups)
        group._arrival = group._gathered = group._layout = None
        group._targets = []
        group.uses = 0
        exchange.groups.append(group)
        if exchange.keep_unsharded:
            for param in group.fsdp_params:
                # Stages 0 to 2 hold all parameters all along; keeping the memory spares fresh pages every step.
                param.free_unsharded_param = keep
    return list(groups)


def _has_work(state: FSDPState, groups: Sequence[FSDPParamGroup]) -> bool:
    """Whether FSDP2's hooks before and after the forward of a module have anything to do: cast, gather, or end what they have begun."""
    policy = state._mp_policy
    casts = policy.param_dtype is not None or policy.output_dtype is not None
    if not groups or casts or state._training_state == TrainingState.FORWARD:
        return True
    spared = (isinstance(group, ExchangingParamGroup) and group.is_spared and group.is_unsharded for group in groups)
    return not all(spared)


def state_of(module: nn.Module) -> FSDPState:
    """The FSDP2 state of a module to which ``fully_shard`` (or ``replicate``) was applied."""
    state = _get_module_fsdp_state(module)
    if state is None:
        raise ValueError(f"{type(module).__name__} was not sharded; pass it to shard() as a block or as the root.")
    return state

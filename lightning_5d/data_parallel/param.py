"""One parameter of FSDP2, whole and as a shard: its gradients, and values that are written to it.

Knows the private parts of FSDP2's ``FSDPParam``, as `param_group` does those of its groups; checked with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from lightning_5d.data_parallel.changes import copy_changes
from lightning_5d.gradients import values_of


def places_of_shards(param: FSDPParam, ranks: int) -> Sequence[torch.Tensor]:
    """Where the shard of each rank goes in the memory of the full parameter; flat where it is one piece."""
    whole, dim = param.all_gather_outputs[0], param.fsdp_placement.dim
    return whole.view(ranks, -1).unbind() if dim == 0 else whole.view(param._orig_size).chunk(ranks, dim)


def move_into(param: FSDPParam, target: torch.Tensor) -> None:
    """Makes a shard a part of the full parameter, which stays in memory anyway: one copy less to hold and to make."""
    local, data = param.sharded_param._local_tensor, param._sharded_param_data  # type: ignore[attr-defined]
    if param.fsdp_placement.dim != 0:  # it is not one piece there
        return
    if data.dtype != target.dtype or data.device != target.device or not local.is_contiguous() or not local.numel():
        return
    if local.untyped_storage().data_ptr() != data.untyped_storage().data_ptr():
        return
    target.copy_(data)
    local.data = target[: local.numel()].view(local.shape)
    param._sharded_param_data = target


def show_plain(param: FSDPParam) -> None:
    """Lets the full parameter be a plain tensor, this rank's part, where the given one was a DTensor over another axis.

    The shard and its gradient stay DTensors over both: what says so was made with the parameter.
    """
    param.is_dtensor, param._unsharded_dtensor_spec = False, None


def as_shown(param: FSDPParam, grad: torch.Tensor) -> torch.Tensor:
    """A shard's gradient as one of the full parameter: over the data ranks alone, in the same memory."""
    mesh = param.mesh_info.mesh
    if not isinstance(grad, DTensor) or grad.device_mesh.ndim == mesh.ndim:
        return grad
    shape, stride = param._orig_size, param._contiguous_orig_stride
    return DTensor.from_local(
        grad._local_tensor, mesh, _over_data_ranks(param), run_check=False, shape=shape, stride=stride
    )


def as_of_shard(param: FSDPParam, grad: torch.Tensor | None) -> torch.Tensor | None:
    """The reverse: what somebody has put in the place of such a gradient."""
    spec = param._sharding_spec
    if not isinstance(grad, DTensor) or grad.device_mesh.ndim == spec.mesh.ndim:
        return grad
    return param.to_sharded_dtensor(grad.redistribute(placements=_over_data_ranks(param))._local_tensor)


def _over_data_ranks(param: FSDPParam) -> list[Placement]:
    given = param._sharding_spec.placements[: param.mesh_info.mesh.ndim]
    return [Replicate() if placement.is_replicate() else param.fsdp_placement for placement in given]


def can_lend(param: FSDPParam) -> bool:
    """Whether a shard that is all of its parameter may be the full one as well: nothing is cast or moved in between."""
    data = param._sharded_param_data
    return data.device == param.device and data.dtype == (param.param_dtype or param.orig_dtype)


def lend(param: FSDPParam) -> None:
    """Makes a shard the full parameter; if it was replaced since the first time, the full one gets its values."""
    data = param._sharded_param_data
    if not param.all_gather_outputs:
        param.all_gather_outputs = [data]
        param.free_unsharded_param = keep  # type: ignore[method-assign]
        param.init_unsharded_param()  # type: ignore[no-untyped-call]
    lent = param.all_gather_outputs[0]
    if lent.data_ptr() != data.data_ptr():
        with torch.autograd._unsafe_preserve_version_counter(lent):
            lent.copy_(data)


def has_gradient(param: FSDPParam) -> bool:
    """Whether backward (or accumulation over several) left a gradient that was not reduced."""
    if not hasattr(param, "_unsharded_param"):
        return False
    return param.unsharded_accumulated_grad is not None or param.unsharded_param.grad is not None


def take_gradient(param: FSDPParam) -> torch.Tensor | None:
    """The gradient that backward (or accumulation over several) left for a parameter, taken away from it."""
    if not hasattr(param, "_unsharded_param"):
        return None
    grad: torch.Tensor
    if param.unsharded_accumulated_grad is not None:
        grad = param.unsharded_accumulated_grad_data
        param.unsharded_accumulated_grad = None
        return grad
    if param.unsharded_param.grad is not None:
        grad = param.unsharded_grad_data
        param.unsharded_param.grad = None
        return grad
    return None


def widen_gradient(param: FSDPParam) -> None:
    """Adds a microbatch's gradient to the sum over microbatches, in the dtype of the reduction if that is another one."""
    if param._unsharded_param.grad is None:
        return
    param.accumulate_unsharded_grad_if_needed()
    param.to_accumulated_grad_if_needed()


def suspend_gradient(param: FSDPParam) -> None:
    """Takes a gradient off the full parameter, where a user's `zero_grad` would find it."""
    full = getattr(param, "_unsharded_param", None)
    if full is not None and full.grad is not None and param.unsharded_accumulated_grad is None:
        param.unsharded_accumulated_grad, full.grad = full.grad, None


def resume_gradient(param: FSDPParam) -> None:
    """Puts a gradient back to where backward adds to it in place, if it has the full parameter's dtype."""
    full, grad = getattr(param, "_unsharded_param", None), param.unsharded_accumulated_grad
    if full is not None and grad is not None and full.grad is None and grad.dtype == full.dtype:
        full.grad, param.unsharded_accumulated_grad = grad, None


def drop_gradient(param: FSDPParam) -> None:
    """Forgets a gradient that was not reduced."""
    param.unsharded_accumulated_grad = None
    if hasattr(param, "_unsharded_param"):
        param._unsharded_param.grad = None


def clear(parameter: torch.Tensor, set_to_none: bool) -> None:
    """What a module's `zero_grad` does to a parameter."""
    if set_to_none:
        parameter.grad = None
    elif parameter.grad is not None:
        values_of(parameter.grad).zero_()


def deliver(params: Sequence[FSDPParam], result: torch.Tensor, shard_numels: Sequence[int]) -> None:
    """Hands the pieces of a finished reduction to the sharded parameters, as FSDP2's ``foreach_reduce`` does."""
    offset = 0
    by_dtype: dict[torch.dtype, torch.Tensor] = {result.dtype: result}
    for param, numel in zip(params, shard_numels, strict=True):
        flat = by_dtype.setdefault(param.orig_dtype, result.to(param.orig_dtype))
        grad = torch.as_strided(flat, param.sharded_size, param.contiguous_sharded_stride, storage_offset=offset)
        offset += numel
        _give(param, grad)


def _give(param: FSDPParam, grad: torch.Tensor) -> None:
    if param.offload_to_cpu:
        grad = grad.to("cpu")
    if param.sharded_param.grad is not None:
        param.sharded_param.grad._local_tensor += grad  # type: ignore[attr-defined]
    else:
        param.sharded_param.grad = param.to_sharded_dtensor(grad)
    for hook in (getattr(param.sharded_param, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(param.sharded_param)


def hand_over(params: Sequence[FSDPParam], grads: Sequence[torch.Tensor], divide_by: float) -> None:
    """Makes gradients, divided in place, those of the shards, where a shard is all of its parameter."""
    for param, grad in zip(params, grads, strict=True):
        _give(param, grad.contiguous() if divide_by == 1 else grad.contiguous().div_(divide_by))


def keep_writes(param: FSDPParam, version: int, compare: bool) -> None:
    """Copies what a step has written to a full parameter (a teacher's average, a limit) to this rank's shard.

    Writes through ``.data`` leave no trace; ``compare`` finds them by comparing values: to a frozen parameter (a teacher's,
    a codebook) wherever the user's code has run since it was gathered.
    """
    if len(param.all_gather_outputs) != 1 or hasattr(param._sharded_local_tensor, "fsdp_post_all_gather"):
        return
    full, shard = param._unsharded_param, param.sharded_param._local_tensor  # type: ignore[attr-defined]
    own = param.all_gather_outputs[0]
    moved = full.data_ptr() != own.data_ptr() and full.numel() > 0
    written = moved or full._version != version
    if shard.numel() and (written or compare):
        mesh = param.mesh_info
        sharded = isinstance(mesh, FSDPMeshInfo)  # and not replicated, as at stage 0 in mixed precision
        dim = param.fsdp_placement.dim
        start = mesh.shard_mesh_rank * -(-full.shape[dim] // mesh.shard_mesh_size) if sharded else 0
        mine = full.detach().narrow(dim, start, shard.shape[dim])
        if mine.data_ptr() != shard.data_ptr():  # else it is a part of the full parameter
            copy_changes(mine, shard)
    if moved:
        full.data = torch.as_strided(own, param._orig_size, param._contiguous_orig_stride, storage_offset=0)


def keep() -> None:
    """In the place of what would free a full parameter."""

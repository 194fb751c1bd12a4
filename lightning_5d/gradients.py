"""One gradient norm over all axes, and clipping by it.

Each parameter counts once, whatever its placement: a dimension of its mesh over which it is sharded adds up, one over which it
is replicated does not. Sums are collected per set of axes and reduced together, so that a step costs at most one collective
per axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_5d.mesh import AXES, ParallelMesh

AxesOf = Callable[[nn.Parameter], Sequence[str]]


def global_norm(
    parameters: Iterable[Tensor],
    mesh: ParallelMesh | None = None,
    norm_type: float = 2.0,
    extra_axes: AxesOf | None = None,
) -> Tensor:
    """The norm of all gradients together, the same number on every rank; every rank calls it.

    Args:
        parameters: Parameters of this rank, plain or `DTensor`; those without gradient count as zero.
        mesh: The ranks by axis; ``None`` if there is only one rank.
        norm_type: The p of the p-norm, ``inf`` included.
        extra_axes: Axes over which other ranks own other parameters (pipeline stages, experts), by parameter.

    Returns:
        A 0-dim tensor on the gradients' device, float32 or wider.

    Raises:
        ValueError: If `norm_type` is not positive.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}; it must be positive (2 is usual, inf the largest element).")
    # One rank may own no gradient at all (a stage without parameters): the axes of the mesh must be visited all the same.
    by_axes: dict[tuple[str, ...], list[Tensor]] = {}
    device, dtype = torch.device("cpu"), torch.float32
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        axes = set(extra_axes(parameter)) if extra_axes is not None and isinstance(parameter, nn.Parameter) else set()
        if isinstance(grad, DTensor):
            axes |= _sharded_axes(grad)
            local = grad.to_local()
        else:
            local = grad
        device, dtype = local.device, torch.promote_types(dtype, local.dtype)
        by_axes.setdefault(tuple(axis for axis in AXES if axis in axes), []).append(local)
    infinite = math.isinf(norm_type)
    keys = list(by_axes)
    parts = torch.zeros(2 ** len(AXES), dtype=dtype, device=device)
    for key in keys:
        norms = torch.stack([n.to(dtype) for n in _norms(by_axes[key], norm_type)])
        parts[_slot(key)] = norms.max() if infinite else norms.pow(norm_type).sum()
    if mesh is not None:
        parts = _reduce(parts, mesh, infinite)
    return parts.max() if infinite else parts.sum().pow(1.0 / norm_type)


def clip_by_norm(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Multiplies gradients by ``max_norm / norm`` where `norm` is above `max_norm`, in place.

    Args:
        parameters: The parameters whose norm `norm` is.
        max_norm: The bound.
        norm: Their `global_norm`.
    """
    # The same small constant as torch.nn.utils.clip_grad_norm_, so that one process gives the same numbers.
    scale_gradients(parameters, (max_norm / (norm + 1e-6)).clamp(max=1.0))


def clip_by_value(parameters: Iterable[Tensor], bound: float) -> None:
    """Limits every gradient element to ``[-bound, bound]``, in place."""
    grads = local_gradients(parameters)
    if grads:
        torch._foreach_clamp_min_(grads, -bound)
        torch._foreach_clamp_max_(grads, bound)


def scale_gradients(parameters: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiplies all gradients by a factor, in place; a `DTensor` keeps its placement."""
    grads = local_gradients(parameters)
    if not grads:
        return
    if isinstance(factor, Tensor):
        by_device: dict[torch.device, list[Tensor]] = {}
        for grad in grads:
            by_device.setdefault(grad.device, []).append(grad)
        for device, group in by_device.items():
            torch._foreach_mul_(group, factor.to(device))
    else:
        torch._foreach_mul_(grads, factor)


def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """This rank's gradient tensors; writing to them writes to the gradients."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [grad._local_tensor if isinstance(grad, DTensor) else grad for grad in grads]


def _norms(grads: list[Tensor], norm_type: float) -> Sequence[Tensor]:
    filled = [grad for grad in grads if grad.numel()]  # a rank's shard may be empty, whose inf-norm does not exist
    if not filled:
        return [torch.zeros((), device=grads[0].device)]
    return torch._foreach_norm(filled, norm_type)


def _sharded_axes(grad: DTensor) -> set[str]:
    names = grad.device_mesh.mesh_dim_names or ()
    axes = set()
    for name, placement in zip(names, grad.placements, strict=True):
        if isinstance(placement, Shard):
            axes.add(name)
        elif not isinstance(placement, Replicate):
            raise ValueError(
                f"A gradient is {placement} over {name!r}: it has to be reduced before its norm means anything."
            )
    return axes


def _slot(axes: Sequence[str]) -> int:
    return sum(1 << AXES.index(axis) for axis in axes)


def _reduce(parts: Tensor, mesh: ParallelMesh, infinite: bool) -> Tensor:
    op = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
    for position, axis in enumerate(AXES):
        if mesh.size(axis) == 1:
            continue
        mine = torch.tensor([bool(slot >> position & 1) for slot in range(len(parts))], device=parts.device)
        values = parts[mine].contiguous()
        dist.all_reduce(values, op=op, group=mesh.group(axis))
        parts[mine] = values
    return parts

"""One gradient norm over all axes, and clipping by it.

Suffixes of tensors: G groups of parameters whose norms are asked for together.
"""

# [Note: every element counts once]
# The gradient of a model lies on many ranks: some parameters are sharded over some axes, some are replicated, some belong to
# one stage or one expert rank alone. Of the ranks that hold the same piece exactly one counts it: the one at index 0 along
# every axis over which the piece is replicated. The sum over the whole world is then the sum over the whole gradient,
# whatever the meshes are, in one all-reduce of one number per group (with stages one all-gather, added up in their order: then
# steps that do not wait for the norm have the same bits). That collective does not depend on which parameters a rank holds, so
# a rank without any (a stage without trained weights) takes part like the others, and all get the same bits.
# Axes over which a piece is replicated are those of the run's mesh that neither the tensor's own mesh covers (its ranks
# are compared with the run's, so a flattened or a hand-made mesh is as good as a named one) nor its plugin names.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from lightning_5d.mesh import AXES, ParallelMesh

AxesOf = Callable[[Tensor], Sequence[str] | None]
"""Of a parameter: the axes along which other ranks hold other gradients, or ``None`` if another rank counts this one."""

_HALF = (torch.float16, torch.bfloat16)


def global_norm(
    parameters: Iterable[Tensor],
    mesh: ParallelMesh | None = None,
    norm_type: float = 2.0,
    extra_axes: AxesOf | None = None,
) -> Tensor:
    """The norm of all gradients together, the same number on every rank; every rank calls it.

    Args:
        parameters: Parameters of this rank, plain or `DTensor`, on any devices and of any dtypes, each counted once however
            often it is listed; those without gradient count as zero.
        mesh: The ranks by axis; ``None`` if there is only one rank.
        norm_type: The p of the p-norm, ``inf`` included.
        extra_axes: What a parameter's placement does not tell: pipeline stages, experts, copies of a tied weight.

    Returns:
        A 0-dim tensor, float64 where the device has it. It is NaN if a gradient holds a NaN, else infinite if one holds an
        infinity (or, at p other than ``inf``, if a power leaves the range of numbers).

    Raises:
        ValueError: If `norm_type` is not positive, or a gradient is spread over ranks and `mesh` is ``None``.
    """
    return global_norms([parameters], mesh, norm_type, extra_axes)[0]


@torch.no_grad()
def global_norms(
    groups: Sequence[Iterable[Tensor]],
    mesh: ParallelMesh | None = None,
    norm_type: float = 2.0,
    extra_axes: AxesOf | None = None,
) -> Tensor:
    """`global_norm` of several groups of parameters at once, which may overlap: one collective for all of them.

    Args:
        groups: The parameters of each group; every rank gives the same number of groups.
        mesh: As for `global_norm`.
        norm_type: As for `global_norm`.
        extra_axes: As for `global_norm`.

    Returns:
        Shape (G,).

    Raises:
        ValueError: As `global_norm` does.
    """
    parts_G, p = _parts(groups, mesh, norm_type, extra_axes)
    largest = math.isinf(p)
    if mesh is not None and mesh.size("pp") > 1:
        parts_G = _over_stages(parts_G, mesh, largest=largest)
    elif mesh is not None and mesh.size(*AXES) > 1:
        parts_G = _reduce(parts_G, largest=largest)
    return parts_G if largest else parts_G.pow(1.0 / p)


def _parts(
    groups: Sequence[Iterable[Tensor]], mesh: ParallelMesh | None, norm_type: float, extra_axes: AxesOf | None
) -> tuple[Tensor, float]:
    """What this rank counts of each group, to be added up over ranks, and the p of the norm."""
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type is {norm_type}; it must be positive (2 is usual, inf the largest element).")
    listed = [{id(parameter): parameter for parameter in group} for group in groups]
    distinct = {key: parameter for group in listed for key, parameter in group.items()}
    complete_gradients(distinct.values())
    counted = _Counting(mesh, extra_axes)
    grads = {key: tensor.grad for key, tensor in distinct.items() if tensor.grad is not None}
    kept = {key: values_of(grad) for key, grad in grads.items() if counted(distinct[key], grad)}
    device = _collective_device(mesh, kept)
    norms = _norms(kept, p, device)
    parts_G = torch.stack([_joined([norms[key] for key in group if key in norms], p, device) for group in listed])
    return parts_G, p


def power_of_stage(parameters: Iterable[Tensor], mesh: ParallelMesh, extra_axes: AxesOf | None = None) -> Tensor:
    """The part of the squared 2-norm that this rank's place in the pipeline has; all ranks of that place call it together.

    Added up in the order of the pipeline, from the first rank on, such parts make the square of `global_norm` to the last bit.

    Args:
        parameters: As for `global_norm`.
        mesh: The ranks by axis.
        extra_axes: As for `global_norm`.

    Returns:
        A 0-dim tensor, float64 where the device has it.
    """
    parts_G, _ = _parts([parameters], mesh, 2.0, extra_axes)
    group = mesh.stage_group
    if group is None:
        return parts_G[0]
    ranks = dist.get_process_group_ranks(group)
    everyone = parts_G.new_empty(len(ranks), 1)
    dist.all_gather(list(everyone.unbind()), parts_G, group=group)
    order = [ranks.index(rank) for rank in mesh.by_stage[mesh.rank("pp")]]
    return everyone[order].sum(0)[0]


def clip_by_norm(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Multiplies gradients by ``max_norm / norm`` where `norm` is above `max_norm`, in place.

    At a norm of zero nothing changes. At one that is not finite there is no right answer: as with
    `torch.nn.utils.clip_grad_norm_` an infinite norm makes finite elements 0 and infinite ones NaN, a NaN makes all NaN.

    Args:
        parameters: The parameters whose norm `norm` is.
        max_norm: The bound; 0 makes all gradients zero, ``inf`` leaves them.
        norm: Their `global_norm`.

    Raises:
        ValueError: If `max_norm` is negative or NaN.
    """
    _check_bound("max_norm", max_norm)
    if math.isinf(max_norm):
        return
    scale_gradients(parameters, clip_factor(max_norm, norm))


def clip_factor(max_norm: float, norm: Tensor) -> Tensor:
    """What `clip_by_norm` multiplies gradients with: 1 if the norm is within its bound."""
    # The same small constant as torch.nn.utils.clip_grad_norm_, so that one process gives the same numbers.
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def clip_by_value(parameters: Iterable[Tensor], bound: float) -> None:
    """Limits every gradient element to ``[-bound, bound]``, in place: infinities become the bound, NaN stays NaN.

    Args:
        parameters: Parameters of this rank, plain or `DTensor`.
        bound: The limit; 0 makes all gradients zero, ``inf`` leaves them.

    Raises:
        ValueError: If `bound` is negative or NaN.
        TypeError: For complex gradients, whose elements have no order.
    """
    _check_bound("The bound of clipping by value", bound)
    parameters = list(parameters)
    complete_gradients(parameters)  # a limit on each summand is none on the sum
    grads = local_gradients(parameters)
    if any(grad.is_complex() for grad in grads):
        raise TypeError(
            'A gradient is complex, and complex numbers cannot be limited by value. Use gradient_clip_algorithm="norm".'
        )
    for group in _by_kind(grads):
        torch._foreach_clamp_min_(group, -bound)
        torch._foreach_clamp_max_(group, bound)


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiplies all gradients by a factor, in place; a `DTensor` keeps its placement."""
    for group in _by_kind(local_gradients(parameters)):
        if not isinstance(factor, Tensor):
            torch._foreach_mul_(group, factor)
            continue
        # The kernel for many tensors wants a factor of their dtype; in half precision that would round it too much.
        dtype = group[0].real.dtype if group[0].is_complex() else group[0].dtype
        torch._foreach_mul_(group, factor.to(group[0].device, torch.float32 if dtype in _HALF else dtype))


@torch.no_grad()
def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """This rank's gradient tensors, each once; writing to them writes to the gradients."""
    distinct = {id(parameter): parameter for parameter in parameters}.values()
    for parameter in distinct:
        if parameter.grad is not None and parameter.grad.layout == torch.sparse_coo:
            parameter.grad = parameter.grad.coalesce()  # values of one that is not may count a row twice
    return [values_of(parameter.grad) for parameter in distinct if parameter.grad is not None]


def values_of(grad: Tensor) -> Tensor:
    """The dense tensor that holds a gradient's values on this rank: a `DTensor`'s shard, a sparse tensor's values."""
    if isinstance(grad, DTensor):
        with torch.no_grad():  # with grad mode on, `to_local` returns another tensor object
            return grad.to_local()
    return grad.coalesce().values() if grad.layout == torch.sparse_coo else grad


def give_gradient(parameter: Tensor, values: Tensor) -> None:
    """Makes values a parameter's gradient on this rank: written into the one that is there, or a new one placed as the parameter is.

    Args:
        parameter: Plain or a `DTensor`.
        values: As many as this rank has of the parameter, in any shape and dtype.
    """
    local = values_of(parameter)
    if parameter.grad is not None:
        values_of(parameter.grad).copy_(values.view(local.shape))
        return
    grad: Tensor = values.view(local.shape).to(local.dtype)
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        shape, stride = parameter.shape, parameter.stride()
        grad = DTensor.from_local(grad, mesh, placements, run_check=False, shape=shape, stride=stride)
    parameter.grad = grad


@torch.no_grad()
def complete_gradients(parameters: Iterable[Tensor]) -> None:
    """Adds up gradients that are still partial sums over an axis, in place; every rank of that axis calls it.

    Plugins complete theirs after backward; this is for gradients of a user's own `DTensor` code. One collective for each
    mesh, axis and dtype among them.

    Raises:
        ValueError: If parts are joined otherwise than by a sum or a mean.
    """
    pending: dict[tuple[DeviceMesh, int, str, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if not isinstance(grad, DTensor):
            continue
        dim = next((dim for dim, placement in enumerate(grad.placements) if placement.is_partial()), None)
        if dim is not None:
            operation = _operation(grad.placements[dim])
            pending.setdefault((grad.device_mesh, dim, operation, grad.dtype), []).append(parameter)
    for (mesh, dim, operation, _), members in pending.items():
        grads = [values_of(member.grad) for member in members if member.grad is not None]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=mesh.get_group(dim))
        if operation == "avg":
            flat.div_(mesh.size(dim))
        for member, local in zip(members, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
            member.grad = _completed(member.grad, dim, local)
    if pending:
        complete_gradients([member for members in pending.values() for member in members])  # over further axes


def _completed(grad: Tensor | None, dim: int, local: Tensor) -> DTensor:
    if not isinstance(grad, DTensor):
        raise TypeError(f"Expected the gradient of a DTensor, got {type(grad).__name__}.")
    placements = [Replicate() if index == dim else placement for index, placement in enumerate(grad.placements)]
    return DTensor.from_local(
        local.view(values_of(grad).shape),
        grad.device_mesh,
        placements,
        run_check=False,
        shape=grad.shape,
        stride=grad.stride(),
    )


def _operation(placement: Placement) -> str:
    operation = placement.reduce_op if isinstance(placement, Partial) else str(placement)
    if operation not in ("sum", "avg"):
        raise ValueError(
            f"A gradient is {placement}, parts that are joined by {operation!r}; only sums and means of gradients have a norm."
        )
    return operation


class _Counting:
    """Whether this rank is the one that counts a gradient; see [Note: every element counts once]."""

    def __init__(self, mesh: ParallelMesh | None, extra_axes: AxesOf | None) -> None:
        self._mesh, self._extra_axes = mesh, extra_axes
        self._known: dict[tuple[int, tuple[Placement, ...], tuple[str, ...]], bool] = {}

    def __call__(self, parameter: Tensor, grad: Tensor) -> bool:
        spread = grad.device_mesh if isinstance(grad, DTensor) else None
        if self._mesh is None:
            if spread is not None and spread.size() > 1:
                raise ValueError(
                    f"A gradient is spread over {spread.size()} ranks, so its norm needs the run's mesh: under FiveD call"
                    " trainer.strategy.gradient_norm(parameters)."
                )
            return True
        axes = self._extra_axes(parameter) if self._extra_axes is not None else ()
        if axes is None:
            return False
        placements = grad.placements if isinstance(grad, DTensor) else ()
        key = id(spread), placements, tuple(axes)
        if key not in self._known:
            self._known[key] = _is_first(self._mesh, axes, spread, placements)
        return self._known[key]


def _is_first(
    mesh: ParallelMesh, axes: Sequence[str], spread: DeviceMesh | None, placements: Sequence[Placement]
) -> bool:
    """Whether this rank is at index 0 along every axis over which a gradient so placed is replicated."""
    covered = set(axes)
    if spread is not None:
        coordinate = spread.get_coordinate()
        if coordinate is None:
            return False
        if any(placement.is_replicate() and index for index, placement in zip(coordinate, placements, strict=True)):
            return False
        covered |= mesh.axes_of(spread)
    return all(mesh.rank(axis) == 0 for axis in AXES if axis not in covered)


def _norms(grads: dict[int, Tensor], p: float, device: torch.device) -> dict[int, Tensor]:
    """The norm of each tensor that has elements (an empty shard has no inf-norm), as wide numbers on `device`."""
    norms: dict[int, Tensor] = {}
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for key, grad in grads.items():
        if grad.numel():
            by_kind.setdefault((grad.device, grad.dtype), []).append(key)
    for (_, dtype), keys in by_kind.items():
        wide = torch.float32 if dtype in _HALF else None  # a norm of half precision would be rounded, or overflow
        found = torch._foreach_norm([grads[key] for key in keys], p, dtype=wide)
        norms.update(zip(keys, torch.stack(found).to(device, _wide(device)).unbind(), strict=True))
    return norms


def _joined(norms: list[Tensor], p: float, device: torch.device) -> Tensor:
    """What several norms come to together: the largest, or the sum of the p-th powers."""
    if not norms:
        return torch.zeros((), dtype=_wide(device), device=device)
    stacked = torch.stack(norms)
    return stacked.max() if math.isinf(p) else stacked.pow(p).sum()


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # mps has no doubles


def _by_kind(grads: Sequence[Tensor]) -> list[list[Tensor]]:
    """Those with elements, by device and dtype, as the kernels for many tensors want them."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        if grad.numel():
            groups.setdefault((grad.device, grad.dtype), []).append(grad)
    return list(groups.values())


def _collective_device(mesh: ParallelMesh | None, grads: dict[int, Tensor]) -> torch.device:
    """Where all ranks have their part: gradients may be elsewhere (offloaded), or there may be none on this rank."""
    if mesh is None:
        return next((grad.device for grad in grads.values()), torch.device("cpu"))
    kind = mesh.device_mesh.device_type
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def _reduce(parts_G: Tensor, *, largest: bool) -> Tensor:
    """The sum, or the largest, over the world."""
    if not largest:
        dist.all_reduce(parts_G)
        return parts_G
    # Which of a number and NaN is the larger depends on the backend, so NaN travels apart.
    missing_G = parts_G.isnan()
    sent = torch.stack([parts_G.masked_fill(missing_G, 0.0), missing_G.to(parts_G.dtype)])
    dist.all_reduce(sent, op=dist.ReduceOp.MAX)
    return sent[0].masked_fill(sent[1] > 0, math.nan)


def _over_stages(parts_G: Tensor, mesh: ParallelMesh, *, largest: bool) -> Tensor:
    """The same over a world with a pipeline, in the order in which `power_of_stage` travels along it: the bits are the same."""
    everyone = parts_G.new_empty(dist.get_world_size(), len(parts_G))
    dist.all_gather(list(everyone.unbind()), parts_G)
    if largest:
        return everyone.amax(0)  # of a number and NaN: NaN
    of_stages = [everyone[ranks].sum(0) for ranks in mesh.by_stage]
    return sum(of_stages[1:], of_stages[0])


def _check_bound(name: str, bound: float) -> None:
    if not bound >= 0:
        raise ValueError(f"{name} is {bound}; it must be 0 or larger (inf for no limit).")

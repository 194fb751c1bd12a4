"""The stacked weights of experts as DTensors over the ranks that hold different experts, each rank with its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from lightning_5d.data_parallel.compatibility import needs_whole_tensors
from lightning_5d.expert_parallel.found import FoundExperts
from lightning_5d.mesh import AXES, ExpertView, ParallelMesh
from lightning_5d.parallelism import Problem
from lightning_5d.tensor_parallel.rows import Rows


def place(found: FoundExperts, view: ExpertView) -> None:
    """Makes the stacked weights of a layer DTensors of which this rank has its experts, in place and without communication.

    They go over the ranks of `view` by their first dimension, and where it cuts experts also by that of `FoundExperts.tensor_dims`; then
    weights that have none are replicated over those ranks. Names, dtype, device and ``requires_grad`` stay; meta tensors stay meta
    tensors. Nothing keeps the whole weights in memory.

    Args:
        found: The layer; its weights are plain and whole, with the same values on every rank.
        view: Which ranks hold which experts.

    Raises:
        ValueError: If the ranks do not divide the experts, or the dimension that is cut.
    """
    if found.count % view.size:
        raise ValueError(f"{found.name} has {found.count} experts, which {view.size} ranks do not divide.")
    for key in found.stacked:
        parameter = found.module._parameters[key]
        if parameter is not None and not isinstance(parameter, DTensor):
            tensor = _placed(parameter.detach(), found, key, view)
            found.module._parameters[key] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)


def _placed(whole: Tensor, found: FoundExperts, key: str, view: ExpertView) -> DTensor:
    mesh, placements = view.device_mesh["ep"], list[Placement]([Shard(0)])
    rows = _cut_rows(found, key, whole.shape, view)
    count = whole.shape[0] // view.size
    if view.tensor > 1:
        mesh = view.device_mesh["ep", "etp"]
        placements.append(Replicate() if rows is None else Shard(rows.dim))
    if whole.is_meta:
        sizes = [count, *whole.shape[1:]]
        if rows is not None:
            sizes[rows.dim] //= view.tensor
        part = whole.new_empty(sizes)
    else:
        part = whole[view.rank * count : (view.rank + 1) * count]
        if rows is not None:
            part = rows.part(part, int(view.device_mesh.get_local_rank("etp")), view.tensor)
        # A copy: a part that is a view would keep the whole weight in memory.
        part = part.clone(memory_format=torch.contiguous_format)
    stride = torch.empty(whole.shape, device="meta").stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=stride)


def _cut_rows(found: FoundExperts, key: str, shape: Sequence[int], view: ExpertView) -> Rows | None:
    """How each expert of a stacked weight is cut over the ranks that have parts of it; ``None`` if it is not."""
    dim = found.tensor_dims.get(key)
    if view.tensor == 1 or dim is None:
        return None
    whole, halves = shape[dim], 2 if key in found.halves else 1
    if whole % (view.tensor * halves):
        raise ValueError(
            f"{found.name}.{key} of shape {tuple(shape)} cannot be cut along dimension {dim} into {view.tensor} parts"
            f"{' of each half' if halves == 2 else ''}."
        )
    if halves == 1:
        return Rows(dim, whole)
    # Of rank r: its part of the first half, then its part of the second.
    places = torch.arange(whole).view(2, view.tensor, -1).transpose(0, 1)
    return Rows(dim, whole, tuple(places.flatten().tolist()))


class ExpertWeights:
    """The stacked weights of a module's experts: places them, and knows which ranks hold what of them.

    Args:
        found: The layers with experts that are in the module; their weights are whole.
        view: Which ranks hold which experts.
        mesh: All ranks by axis.

    Raises:
        ValueError: As `place` does.
    """

    def __init__(self, found: Sequence[FoundExperts], view: ExpertView, mesh: ParallelMesh) -> None:
        self._found, self._view = found, view
        self._axes = {"ep": _in_order(mesh, view.device_mesh["ep"]), "etp": list[str]()}
        if view.tensor > 1:
            self._axes["etp"] = _in_order(mesh, view.device_mesh["etp"])
        self._cut: dict[tuple[str, str], Rows] = {}
        for layer in found:
            for key in layer.stacked:
                parameter = layer.module._parameters[key]
                rows = None if parameter is None else _cut_rows(layer, key, parameter.shape, view)
                if rows is not None:
                    self._cut[layer.name, key] = rows
            place(layer, view)
        self._known: dict[int, tuple[Tensor, Sequence[str]]] = {}
        self.refresh()

    @property
    def forms(self) -> Mapping[str, Rows]:
        """How those weights are stored that a checkpoint has in another form, by name."""
        return {f"{name}.{key}": rows for (name, key), rows in self._cut.items() if rows.index is not None}

    def gradient_axes(self, parameter: Tensor) -> Sequence[str]:
        """See `lightning_5d.parallelism.Parallelized.gradient_axes`: the axes on which those ranks lie that hold other experts."""
        known = self._known.get(id(parameter))
        if known is None or known[0] is not parameter:
            self.refresh()
            known = self._known.get(id(parameter), (parameter, ()))
        return known[1]

    def refresh(self) -> None:
        """Gets to know the parameters that are in the module now, besides those it knows; to be called between steps.

        See [Note: two tensors of one parameter] in `lightning_5d.tensor_parallel.placement`.
        """
        for layer in self._found:
            for key in layer.stacked:
                parameter = layer.module._parameters[key]
                if parameter is not None:
                    cut = (layer.name, key) in self._cut
                    axes = [*self._axes["ep"], *(self._axes["etp"] if cut else ())]
                    self._known[id(parameter)] = parameter, axes

    def optimizer_problems(self, optimizers: Sequence[Optimizer]) -> list[Problem]:
        """Optimizers that need more of a tensor than a rank holds, or take experts together with other weights in a way that torch cannot."""
        ranks = self._view.size * self._view.tensor
        if not self._found or ranks == 1:
            return []
        problems = [
            Problem(
                f"{type(optimizer).__name__} {reason}, and {ranks} ranks have a part of the experts each.",
                "Use another optimizer.",
            )
            for optimizer in optimizers
            if (reason := needs_whole_tensors(optimizer)) is not None
        ]
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.ASGD) and _at_once(optimizer):
                what = "ASGD updates all weights in one call, which torch cannot where experts live on other ranks than the weights around them."
                problems.append(Problem(what, "Use ASGD(foreach=False)."))
        return problems


# Checked with torch 2.13: of its optimizers this one alone has a call (`torch._foreach_addcmul_` with one factor) that refuses several meshes.
def _at_once(optimizer: Optimizer) -> bool:
    """Whether it updates a list of weights together; by itself it does on accelerators."""
    groups = optimizer.param_groups
    return any(
        group["foreach"] or (group["foreach"] is None and any(p.device.type != "cpu" for p in group["params"]))
        for group in groups
    )


def _in_order(mesh: ParallelMesh, part: DeviceMesh) -> list[str]:
    axes = mesh.axes_of(part)
    return [axis for axis in AXES if axis in axes]

"""Axis names and their order, sizes from plugins, and the ranks arranged by axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_5d.parallelism import Parallelism, Problem

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, outermost to innermost: neighbours in rank share `tp`, which needs the fastest links."""

DATA_AXES = ("dp_replicate", "dp_shard")
"""The axes whose ranks read different samples: samplers, weights of losses, logs and metrics go by them."""

SHARD_AXES = ("dp_shard", "cp")
"""The axes over which ZeRO shards. Ranks along ``cp`` hold parts of the same samples, and so parts of the same gradients."""

GRADIENT_AXES = ("dp_replicate", *SHARD_AXES)
"""The axes over which ZeRO averages gradients: all whose ranks hold the same weights and compute from other tokens."""


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` that is closest to `wanted` (the smaller one on a tie)."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: (abs(d - wanted), d))


def resolve_sizes(world_size: int, plugins: Sequence[Parallelism]) -> tuple[dict[str, int], list[Problem]]:
    """Sizes of all axes from what the plugins ask for.

    Args:
        world_size: Number of ranks.
        plugins: The plugins of a run. At most one of their axes may be ``"auto"``; without any, ``dp_shard`` is.

    Returns:
        The size of every axis in `AXES` (their product is the world size if there is no problem), and what is wrong.
    """
    problems: list[Problem] = []
    asked: dict[str, int | str] = {}
    for plugin in plugins:
        for axis, size in plugin.mesh_sizes().items():
            if axis not in AXES:
                problems.append(
                    Problem(f"{plugin} brings the unknown mesh axis {axis!r}.", f"Known are {', '.join(AXES)}.")
                )
            elif isinstance(size, bool) or not (size == "auto" or (isinstance(size, int) and size >= 1)):
                problems.append(
                    Problem(f"The size of axis {axis!r} is {size!r}.", 'Give a whole number of at least 1, or "auto".')
                )
            else:
                asked[axis] = size
    fixed = {axis: size for axis, size in asked.items() if isinstance(size, int)}
    taken = math.prod(fixed.values())
    auto = [axis for axis, size in asked.items() if size == "auto"]
    if not any(axis in asked for axis in DATA_AXES):
        auto.append("dp_shard")
    if len(auto) > 1:
        problems.append(Problem(f'The axes {" and ".join(auto)} are both "auto".', "Give a number to all but one."))
    sizes = {axis: fixed.get(axis, 1) for axis in AXES}
    if problems:
        return sizes, problems
    written = " x ".join(f"{axis}={size}" for axis, size in fixed.items() if size > 1) or "1"
    if auto:
        if world_size % taken:
            other = nearest_divisor(world_size, taken)
            bigger = math.ceil(world_size / taken) * taken
            problems.append(
                Problem(
                    f"{world_size} ranks cannot be divided by {written}{f' = {taken}' if ' x ' in written else ''}.",
                    f"{'' if ' x ' in written else written.partition('=')[0] + '='}{other} works with {world_size} ranks, or"
                    f" use {bigger} ranks.",
                )
            )
        else:
            sizes[auto[0]] = world_size // taken
    elif taken != world_size:
        problems.append(
            Problem(
                f"The sizes {written} make {taken} ranks, but the run has {world_size}.",
                f'Use devices x num_nodes = {taken}, or set the data size to "auto".',
            )
        )
    return sizes, problems


@dataclass(frozen=True)
class ExpertView:
    """The ranks of a place of the pipeline arranged for experts, which live on other ranks than the weights around them.

    Neighbours in rank, over ``dp_shard x cp x tp`` as one, hold different experts. Those that are left have the same ones, and other tokens.

    Attributes:
        size: Ranks that hold different experts.
        tensor: Ranks that hold parts of the same experts: 1, or all of ``tp``, which are then not among the others.
        device_mesh: The world over ``pp``, ``dp_replicate`` and ``etp``, as far as they are larger than one, and always ``edp`` and ``ep``; outermost
            to innermost ``pp, dp_replicate, edp, ep, etp``. A root of its own.
        shard_mesh: The ranks with the same part of the same experts, as ZeRO takes them: ``edp``, or ``dp_replicate`` and ``edp``.
        data_size: Ranks with other tokens: what sums of gradients over all of them are divided by, though `shard_mesh` has fewer ranks.
    """

    size: int
    tensor: int
    device_mesh: DeviceMesh
    shard_mesh: DeviceMesh
    data_size: int

    @property
    def rank(self) -> int:
        """This rank's place among those that hold different experts."""
        return int(self.device_mesh.get_local_rank("ep"))

    def covers(self, mesh: DeviceMesh) -> bool:
        """Whether a mesh is a part of this arrangement."""
        # Not by its root: torch (checked with 2.13) remembers operations by the meshes of tensors, and then gives an equal mesh of an
        # earlier arrangement.
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=False))
        return sizes.get("ep") == self.size and sizes.get("etp", 1) == self.tensor


@dataclass(frozen=True)
class ParallelMesh:
    """The ranks of a run arranged by axis.

    Attributes:
        sizes: Size of every axis in `AXES`.
        device_mesh: The axes larger than one (and always ``dp_shard``) as a `DeviceMesh`.
        timeout: Longest wait for other ranks.
    """

    sizes: dict[str, int]
    device_mesh: DeviceMesh
    timeout: timedelta = timedelta(minutes=30)

    @classmethod
    def create(
        cls, sizes: dict[str, int], device_type: str, timeout: timedelta = timedelta(minutes=30)
    ) -> ParallelMesh:
        """Arranges the ranks of the initialised world; every rank calls it.

        Axes of size one are left out, as each would cost a process group per rank.
        """
        names = tuple(axis for axis in AXES if sizes[axis] > 1 or axis == "dp_shard")
        mesh = init_device_mesh(device_type, tuple(sizes[n] for n in names), mesh_dim_names=names)
        return cls(dict(sizes), mesh, timeout)

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        kind = self.device_mesh.device_type
        return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())

    def size(self, *axes: str) -> int:
        """Number of ranks along these axes together."""
        return math.prod(self.sizes[axis] for axis in axes)

    def rank(self, *axes: str) -> int:
        """This rank's index along these axes together, the first one outermost."""
        index = 0
        for axis in axes:
            local = self.device_mesh.get_local_rank(axis) if axis in self.names else 0
            index = index * self.sizes[axis] + local
        return index

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of the ranks that differ from this one along `axis` alone.

        Raises:
            ValueError: If the axis has size one: there is no such group.
        """
        if axis not in self.names:
            raise ValueError(f"Axis {axis!r} has size 1 here; axes with a group: {', '.join(self.names)}.")
        return self.device_mesh.get_group(axis)

    def line(self, axis: str) -> dist.ProcessGroup:
        """The same as `group`, and where the axis has size one a group of this rank alone."""
        return self.group(axis) if axis in self.names else self._alone

    def across(self, *axes: str) -> dist.ProcessGroup:
        """The ranks that differ from this one along these axes alone, in mesh order; all ranks ask for it together the first time.

        Raises:
            ValueError: If they have size one together: there is no such group.
        """
        present = tuple(axis for axis in AXES if axis in axes and self.sizes[axis] > 1)
        if len(present) < 2:
            return self.group(present[0] if present else axes[0])
        return self.device_mesh[present]._flatten("_".join(present)).get_group()

    def submesh(self, *axes: str) -> DeviceMesh:
        """The mesh of those of `axes` that are larger than one, or of ``dp_shard`` where none is."""
        names = tuple(axis for axis in axes if axis in self.names and self.sizes[axis] > 1) or ("dp_shard",)
        return self.device_mesh[names]

    def axes_of(self, mesh: DeviceMesh) -> set[str]:
        """The axes along which the ranks of any other mesh of this world differ from one another."""
        ranks = mesh.mesh.flatten().tolist()
        found, stride = set(), 1
        for name in reversed(self.names):
            size = self.sizes[name]
            if len({self._places[rank] // stride % size for rank in ranks}) > 1:
                found.add(name)
            stride *= size
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """Axes present in `device_mesh`."""
        return self.device_mesh.mesh_dim_names or ()

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.device_mesh.mesh.flatten().tolist())}

    @cached_property
    def _alone(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(
            [dist.get_rank()], timeout=self.timeout, use_local_synchronization=True
        )
        return group

    @cached_property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that read different samples and otherwise hold the same place as this one."""
        mesh = self.submesh(*DATA_AXES)
        return mesh.get_group() if mesh.ndim == 1 else mesh._flatten("dp").get_group()

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        """The ranks that ZeRO averages gradients over, as it takes them: what it shards over, in replicas if there are any.

        One dimension, or two: ``dp_replicate`` and then what is sharded over, which is ``dp_shard`` and ``cp`` as one. All ranks ask
        for it together the first time.
        """
        parts = [self.device_mesh[axis] for axis in SHARD_AXES if axis in self.names and self.sizes[axis] > 1]
        if len(parts) > 1:
            parts = [self.device_mesh[SHARD_AXES]._flatten("_".join(SHARD_AXES))]
        if self.sizes["dp_replicate"] > 1:
            parts = [self.device_mesh["dp_replicate"], *parts]
        if len(parts) < 2:
            return parts[0] if parts else self.device_mesh["dp_shard"]
        # Put together, not sliced: torch (checked with 2.13) will not slice a flattened axis for long. The root stays the same, which
        # lets weights be spread over these axes and the tensor axis.
        return DeviceMesh._concatenate(parts)

    def expert_view(self, size: int, tensor: int = 1) -> ExpertView:
        """The ranks arranged for experts; all ranks ask for it together the first time.

        Args:
            size: Ranks that hold different experts; divides the ranks of ``dp_shard``, ``cp`` and (unless `tensor` takes it) ``tp`` together.
            tensor: Ranks that hold parts of the same experts: 1, or the size of ``tp``.

        Raises:
            ValueError: If these sizes do not fit.
        """
        if (size, tensor) not in self.expert_views:
            self.expert_views[size, tensor] = self._arranged(size, tensor)
        return self.expert_views[size, tensor]

    def _arranged(self, size: int, tensor: int) -> ExpertView:
        ranks = self.size("dp_shard", "cp", "tp") // tensor
        if tensor not in (1, self.size("tp")) or ranks % size:
            raise ValueError(
                f"{ranks} ranks cannot be arranged as {size} for experts, with {tensor} for parts of each."
            )
        sizes = {
            "pp": self.size("pp"),
            "dp_replicate": self.size("dp_replicate"),
            "edp": ranks // size,
            "ep": size,
            "etp": tensor,
        }
        names = tuple(name for name, count in sizes.items() if count > 1 or name in ("edp", "ep"))
        kind = self.device_mesh.device_type
        mesh = init_device_mesh(kind, tuple(sizes[name] for name in names), mesh_dim_names=names)
        shard = mesh["dp_replicate", "edp"] if "dp_replicate" in names else mesh["edp"]
        return ExpertView(size, tensor, mesh, shard, self.size(*GRADIENT_AXES))

    @cached_property
    def expert_views(self) -> dict[tuple[int, int], ExpertView]:
        """The arrangements for experts that have been asked for, by size and parts."""
        return {}

    @cached_property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that must hold the same batch as this one (they differ in pp, cp or tp), or ``None`` if alone."""
        axes = tuple(axis for axis in AXES if axis not in DATA_AXES and self.sizes[axis] > 1)
        if not axes:
            return None
        mesh = self.device_mesh[axes]
        return mesh.get_group() if mesh.ndim == 1 else mesh._flatten("_".join(axes)).get_group()

    @cached_property
    def stage_group(self) -> dist.ProcessGroup | None:
        """The ranks at the same place of the pipeline as this one, or ``None`` if alone."""
        axes = tuple(axis for axis in AXES if axis != "pp" and self.sizes[axis] > 1)
        if not axes:
            return None
        mesh = self.device_mesh[axes]
        return mesh.get_group() if mesh.ndim == 1 else mesh._flatten("_".join(axes)).get_group()

    @cached_property
    def by_stage(self) -> list[list[int]]:
        """The ranks of the world at each place of the pipeline."""
        ranks = self.device_mesh.mesh
        if "pp" not in self.names:
            return [ranks.flatten().tolist()]
        return [row.flatten().tolist() for row in ranks.movedim(self.names.index("pp"), 0).unbind()]

    def describe(self) -> str:
        """One line for the log, such as ``pp=2 x dp_shard=4 (8 ranks)``."""
        return f"{' x '.join(f'{n}={self.sizes[n]}' for n in self.names)} ({math.prod(self.sizes.values())} ranks)"

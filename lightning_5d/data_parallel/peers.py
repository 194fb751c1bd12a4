"""The ranks that parameter groups are spread over: which of them shard, which replicate, and how they reach each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_5d.data_parallel.agreement import Agreement
from lightning_5d.data_parallel.reduction import PendingReductions
from lightning_5d.data_parallel.transport import Transport
from lightning_5d.data_parallel.transports import open_transport


@dataclass(frozen=True)
class Spread:
    """A mesh of ranks with the same parameters, as a ZeRO stage uses it.

    Attributes:
        mesh: As FSDP2 takes it.
        shard: The dimension over which state is sharded, if it has more than one rank.
        replicate: That over which it is equal, likewise.
        divide_by: What sums of gradients over all of them are divided by.
    """

    mesh: DeviceMesh
    shard: DeviceMesh | None
    replicate: DeviceMesh | None
    divide_by: int

    @classmethod
    def over(cls, mesh: DeviceMesh, stage: int, divide_by: int | None = None) -> Spread:
        """The use that a stage makes of a mesh; all ranks of the mesh's root call it together.

        Args:
            mesh: One dimension (shard) or two (replicate, shard).
            stage: Of ZeRO; 0 replicates over all dimensions.
            divide_by: The number of ranks if ``None``.

        Raises:
            ValueError: If the mesh has no or more than two dimensions, or two without names.
        """
        if mesh.ndim not in (1, 2):
            raise ValueError(f"The data mesh has {mesh.ndim} axes; give one (shard) or two (replicate, shard).")
        names = mesh.mesh_dim_names
        if mesh.ndim == 2 and names is None:
            raise ValueError("The axes of a two-dimensional data mesh need names: (replicate, shard).")
        parts = [mesh] if mesh.ndim == 1 or names is None else [mesh[name] for name in names]
        shard = parts[-1] if parts[-1].size() > 1 else None
        replicate = parts[0] if len(parts) == 2 and parts[0].size() > 1 else None
        used = mesh if replicate is not None else parts[-1]
        if stage == 0:
            used = mesh._flatten() if shard is not None and replicate is not None else replicate or used
            shard, replicate = None, used if used.size() > 1 else None
        return cls(used, shard, replicate, mesh.size() if divide_by is None else divide_by)

    @property
    def axes(self) -> list[DeviceMesh]:
        """The one-dimensional meshes with more than one rank."""
        return [axis for axis in (self.replicate, self.shard) if axis is not None]

    def peers(self, *, transports: bool, shared_memory: bool = True) -> Peers:
        """Connects the ranks; all of them call it.

        Args:
            transports: Whether groups exchange through transports; else FSDP2's own collectives do it.
            shared_memory: Ranks on one host exchange through shared memory where possible.
        """
        shard, replicate = (
            open_transport(axis.get_group(), shared_memory) if transports and axis is not None else None
            for axis in (self.shard, self.replicate)
        )
        opened = [transport for transport in (shard, replicate) if transport is not None]
        agreement = Agreement(opened, [axis.get_group() for axis in self.axes])
        count = math.prod(axis.size() for axis in self.axes)
        return Peers(tuple(self.axes), shard, replicate, self.divide_by, count, agreement)


@dataclass
class Peers:
    """Ranks with the same parameters, and how they reach each other.

    Attributes:
        axes: Their meshes, of one dimension each, with more than one rank.
        shard: The transport over which state is sharded; ``None`` where that is one rank, or FSDP2's collectives are used.
        replicate: That over which it is equal, likewise.
        divide_by: What sums of gradients over all of them are divided by.
        count: How many they are.
        agreement: What their hosts agree on.
        pending: Reductions among them that are under way.
    """

    axes: tuple[DeviceMesh, ...]
    shard: Transport | None
    replicate: Transport | None
    divide_by: int
    count: int
    agreement: Agreement
    pending: PendingReductions = field(default_factory=PendingReductions)

    @property
    def transports(self) -> Iterator[Transport]:
        """The transports there are."""
        return (transport for transport in (self.shard, self.replicate) if transport is not None)

    @property
    def can_poll(self) -> bool:
        """Whether a reduction may be found to have arrived before someone waits for it."""
        return all(transport.can_poll for transport in self.transports)

    def correct_mean(self, reduced: Tensor) -> None:
        """Makes of means over these ranks, in place, what gradients are: their sums divided by `divide_by`."""
        reduced.mul_(self.count / self.divide_by)

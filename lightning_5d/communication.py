"""Communication as Lightning asks for it: over the data ranks where values differ, over the world where all must agree."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

if TYPE_CHECKING:
    from lightning_5d.mesh import ParallelMesh

T = TypeVar("T")

PATIENCE_SECONDS = 20.0
"""How long rank 0 waits for the others where all have to come."""


class MeshCommunication(ParallelStrategy, ABC):
    """The collectives of a Lightning strategy whose ranks are arranged in a mesh."""

    @property
    @abstractmethod
    def mesh(self) -> ParallelMesh:
        """The ranks by axis."""

    @override
    def barrier(self, name: str | None = None) -> None:
        if not dist.is_initialized():
            return
        device = self.root_device
        dist.barrier(device_ids=[device.index] if dist.get_backend() == "nccl" else None)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        if not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        """Reduces over the data ranks (others hold the same), or over `group`; anything but a tensor is returned as it is."""
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        group = self.mesh.data_group if group is None else group
        op, mean = _reduction(reduce_op)
        dist.all_reduce(tensor, op=op, group=group)
        if not mean:
            return tensor
        size = dist.get_world_size(group)
        return tensor.div_(size) if tensor.is_floating_point() else tensor.copy_(tensor / size)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if not dist.is_initialized():
            return decision
        flag = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(flag)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        group = self.mesh.data_group if group is None else group
        return _all_gather_ddp_if_available(tensor, group=group, sync_grads=sync_grads)


def gather_ranks(where: str) -> None:
    """Ends once all ranks have come here; every rank calls it, and rank 0 waits for the others.

    A collective that only rank 0 has entered would wait for its whole time limit, half an hour. The other ranks have nothing
    to do between the last collective and this call that could take them long, so rank 0 need not be patient.

    Args:
        where: What the ranks have in common here, for the message.

    Raises:
        MisconfigurationException: On rank 0, if others have not come within `PATIENCE_SECONDS`.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    rank = dist.get_rank()
    # Checked with torch 2.13: the store of the default group; it is not public.
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"fived/arrivals/{rank}", 1)
    if rank != 0:
        return
    missing = list(range(1, dist.get_world_size()))
    limit = time.monotonic() + PATIENCE_SECONDS
    while missing := [other for other in missing if store.add(f"fived/arrivals/{other}", 0) < number]:
        if time.monotonic() > limit:
            raise MisconfigurationException(
                f"Rank 0 has waited {PATIENCE_SECONDS:g} s in {where} for rank {', '.join(map(str, missing[:8]))}"
                f"{', …' if len(missing) > 8 else ''} of {dist.get_world_size()}. State is collected from all ranks: call"
                f" {where} on every rank, not under `if trainer.is_global_zero`; only rank 0 writes the file."
            )
        time.sleep(0.01)


def _reduction(asked: Any) -> tuple[Any, bool]:
    """The reduction to run and whether to divide by the group's size after it (not every backend averages)."""
    if asked is None:
        return dist.ReduceOp.SUM, False
    if not isinstance(asked, str):
        return (dist.ReduceOp.SUM, True) if asked == dist.ReduceOp.AVG else (asked, False)
    if asked.lower() in ("mean", "avg"):
        return dist.ReduceOp.SUM, True
    return getattr(dist.ReduceOp, asked.upper()), False


def point_metrics_to(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Torchmetrics add up over the world by default; ranks that hold the same batch must count once."""
    if dist.get_world_size(group) == dist.get_world_size():
        return
    from torchmetrics import Metric

    for child in module.modules():
        if isinstance(child, Metric) and child.process_group is None:
            child.process_group = group


def destroy_process_groups() -> None:
    """Ends all process groups of this process, and what torch remembers about them."""
    if not dist.is_initialized():
        return
    dist.destroy_process_group()
    # Checked with torch 2.13: DTensor caches its decisions together with the meshes they were made for. A later mesh of
    # the same shape compares equal, and would be given the groups of the one that is gone. The planners hold meshes, and so
    # groups with the threads of their backends, for as long as the process lives.
    from torch.distributed.tensor import _collective_utils, _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _redistribute.clear_redistribute_planner_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    for function in vars(_redistribute).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()

"""A stand-in for the context axis: doors behind which each rank has some of the rows of a batch, as there it has some of the tokens.

Outside of doors everything is whole and the same on all ranks of the axis, and gradients inside are summands, as behind the true
doors; but rows need no attention over ranks, so any module will do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_5d.mesh import ParallelMesh
from lightning_5d.parallelism import Dtypes, Parallelism, Parallelized, Size
from lightning_5d.plan import ParallelPlan


@dataclass(frozen=True)
class RowsApart(Parallelism):
    """Cuts rows at the doors: the modules with weights that the LightningModule calls itself."""

    axis: ClassVar[str] = "context"
    order: ClassVar[int] = 40

    size: int = 2

    def mesh_sizes(self) -> dict[str, Size]:
        return {"cp": self.size}

    def parallelize(self, module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, dtypes: Dtypes) -> Parallelized:
        return _Doors(module, mesh)


class _Doors(Parallelized):
    def __init__(self, module: nn.Module, mesh: ParallelMesh) -> None:
        self._module, self._group = module, mesh.group("cp")

    def all_at_work(self, axes: Sequence[Parallelized]) -> None:
        for door in doors(self._module):
            if any(True for _ in door.parameters()):
                door.register_forward_pre_hook(partial(_enter, self._group), prepend=True, with_kwargs=True)
                door.register_forward_hook(partial(_leave, self._group))


def doors(module: nn.Module) -> list[nn.Module]:
    """Children, and elements of containers."""
    found: list[nn.Module] = []
    for child in module.children():
        found += child.children() if isinstance(child, nn.ModuleList) else [child]
    return found


def _enter(group: dist.ProcessGroup, door: nn.Module, args: Any, kwargs: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, partial(_Part.apply, group), (args, kwargs))


def _leave(group: dist.ProcessGroup, door: nn.Module, args: Any, output: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, partial(_Whole.apply, group), output)


def _part(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    return whole.chunk(group.size())[group.rank()].contiguous()


def _gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts)


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, whole: Tensor) -> Tensor:
        ctx.group = group
        return _part(whole, group).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, _gathered(gradient / ctx.group.size(), ctx.group)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, part: Tensor) -> Tensor:
        ctx.group = group
        return _gathered(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, _part(gradient, ctx.group) * ctx.group.size()

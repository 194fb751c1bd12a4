"""A stand-in for the context axis: doors behind which each rank has some of the rows of a batch, as there it has some of the tokens.

Outside of doors everything is whole and the same on all ranks of the axis, and gradients inside are summands, as behind the true
doors; but rows need no attention over ranks, so any module will do.
"""

from collections.abc import Hashable, Sequence
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
    shown: bool = False
    """Outputs stay apart from door to door, and only the last one's are put together."""

    def mesh_sizes(self) -> dict[str, Size]:
        return {"cp": self.size}

    def parallelize(self, module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, dtypes: Dtypes) -> Parallelized:
        return _Doors(module, mesh, self.shown)


class _Doors(Parallelized):
    def __init__(self, module: nn.Module, mesh: ParallelMesh, shown: bool) -> None:
        self._module, self._group, self._shown = module, mesh.group("cp"), shown

    def all_at_work(self, axes: Sequence[Parallelized]) -> None:
        found = doors(self._module)
        for door in found:
            if any(True for _ in door.parameters()):
                leave = _show if self._shown and door is not found[-1] else partial(_leave, self._group)
                door.register_forward_pre_hook(partial(_enter, self._group), prepend=True, with_kwargs=True)
                door.register_forward_hook(leave)

    def plain_form(self, tensor: Tensor) -> tuple[Tensor, Hashable] | None:
        return (tensor.as_subclass(Tensor), "rows") if isinstance(tensor, Shown) else None

    def from_plain_form(self, plain: Tensor, form: Any) -> Tensor:
        assert form == "rows"
        return plain.as_subclass(Shown)


class Shown(Tensor):
    """Rows of this rank on the way from one door to the next; nobody else may do anything with them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in ("__get__", "dim", "as_subclass"):
            raise TypeError(f"{func.__name__} of rows that only doors understand")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _show(door: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.as_subclass(Shown)


def doors(module: nn.Module) -> list[nn.Module]:
    """Children, and elements of containers."""
    found: list[nn.Module] = []
    for child in module.children():
        found += child.children() if isinstance(child, nn.ModuleList) else [child]
    return found


def _enter(group: dist.ProcessGroup, door: nn.Module, args: Any, kwargs: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, partial(_entered, group), (args, kwargs))


def _entered(group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    # From door to door a gradient would be multiplied by the number of ranks and divided again.
    return tensor.as_subclass(Tensor) if isinstance(tensor, Shown) else _Part.apply(group, tensor)


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

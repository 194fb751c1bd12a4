"""A network with hand-made experts, of which every token uses all, and the same few steps of it on one process and on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

from lightning_5d.checkpoint.forms import whole_tensor
from lightning_5d.data_parallel import Engine, ShardOptions, shard
from lightning_5d.expert_parallel.found import FoundExperts
from lightning_5d.expert_parallel.placement import ExpertWeights
from lightning_5d.mesh import AXES, ExpertView, ParallelMesh
from tests.data_parallel.training import Run, inputs

WIDTH = 6


class _Gathered(torch.autograd.Function):
    """Rows of all ranks of a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _own_part_of_sum(grad, ctx.group), None


class _Summed(torch.autograd.Function):
    """The reverse: this rank's rows of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _own_part_of_sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        parts = [torch.empty_like(grad) for _ in range(ctx.group.size())]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts), None


def _own_part_of_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.detach().float().clone()
    dist.all_reduce(total, group=group)
    return total.to(x.dtype).chunk(group.size())[group.rank()].clone()


class Experts(nn.Module):
    """Stacked experts; each rank of `group` has some of them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, 5, WIDTH) / 2)
        self.shift = nn.Parameter(torch.randn(count, 5))
        self.down = nn.Parameter(torch.randn(count, WIDTH, 5) / 2)
        self.count = count
        self.group: dist.ProcessGroup | None = None

    def reset_parameters(self) -> None:
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.5)

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        if self.group is None:
            return self._sum(x, gates)
        x, gates = _Gathered.apply(x, self.group), _Gathered.apply(gates, self.group)
        mine = gates.chunk(self.group.size(), 1)[self.group.rank()]
        return _Summed.apply(self._sum(x, mine), self.group)

    def _sum(self, x: Tensor, gates: Tensor) -> Tensor:
        hidden = torch.tanh(torch.einsum("nd,eod->eno", x, self.up) + self.shift[:, None])
        return torch.einsum("eno,edo,ne->nd", hidden, self.down, gates)


class MixtureBlock(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, count, bias=False)
        self.experts = Experts(count)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        return x + self.experts(hidden, self.router(hidden).softmax(-1))


class DenseBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Mixture(nn.Module):
    """Dense blocks and blocks with experts in turn. In some modes ranks skip some of them."""

    def __init__(self, count: int = 4, mode: str = "all") -> None:
        super().__init__()
        self.mode = mode
        self.inp = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(
            [DenseBlock(), MixtureBlock(count), DenseBlock(), DenseBlock(), MixtureBlock(count), DenseBlock()]
        )
        self.out = nn.Linear(WIDTH, 2)
        if mode == "experts frozen":
            for layer in self.experts():
                layer.requires_grad_(False)
        elif mode == "one layer trained":
            self.requires_grad_(False)
            self.blocks[1].experts.requires_grad_(True)
        elif mode == "halves":
            self.blocks[1].experts.down.requires_grad_(False)

    def experts(self) -> list[Experts]:
        return [module for module in self.modules() if isinstance(module, Experts)]

    def parallel_blocks(self) -> Sequence[nn.Module]:
        return list(self.blocks)

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        x = self.inp(x.to(self.inp.weight.dtype))
        for index, block in enumerate(self.blocks):
            # Ranks of one set of experts skip such a block together, as nobody else could answer the others of them.
            if self.mode == "skipped" and ((rank < 2 and index == 1) or (rank == 2 and index == 3)):
                continue
            x = block(x)
        return self.out(x)

    def loss(self, x: Tensor, rank: int) -> Tensor:
        return F.softplus(self(x, rank).float()).mean()


@dataclass(frozen=True)
class Layout:
    """A run on ranks."""

    options: ShardOptions
    ep: int
    sizes: tuple[int, int, int, int, int] = (1, 1, 4, 1, 1)
    count: int = 4
    mode: str = "all"
    accumulation: int = 1
    optimizer: str = "AdamW"

    @property
    def world(self) -> int:
        return int(torch.tensor(self.sizes).prod())


def whole(tensor: Tensor) -> Tensor:
    return whole_tensor(tensor).detach().clone()


def half(dtype: torch.dtype) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)


def make(layout: Layout, seed: int = 0) -> Mixture:
    torch.manual_seed(seed)
    return Mixture(layout.count, layout.mode)


def optimizer_of(module: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def one_process(layout: Layout, steps: int = 3) -> Run:
    """All ranks' microbatches in one process."""
    torch.set_num_threads(1)
    module, run = make(layout), Run()
    optimizer = optimizer_of(module, layout.optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for microbatch in range(layout.accumulation):
            for rank in range(layout.world):
                loss = module.loss(inputs(step, microbatch, rank), rank) / (layout.accumulation * layout.world)
                loss.backward()
                total += loss.item()
        run.losses.append(total)
        run.gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()})
        optimizer.step()
    run.parameters = {n: p.detach().clone() for n, p in module.named_parameters()}
    return run


def mesh_of(sizes: Sequence[int]) -> ParallelMesh:
    return ParallelMesh.create(dict(zip(AXES, sizes, strict=True)), "cpu", timedelta(seconds=30))


def placed(module: Mixture, mesh: ParallelMesh, view: ExpertView) -> ExpertWeights:
    """Leaves this rank its experts."""
    found = []
    for name, layer in module.named_modules():
        if isinstance(layer, Experts):
            found.append(FoundExperts(name, layer, layer.count, None, ("up", "shift", "down"), compute=_unused))
            layer.group = view.device_mesh.get_group("ep")
    return ExpertWeights(found, view, mesh)


def _unused(*args: Any) -> Any:
    raise NotImplementedError


def engine_of(module: Mixture, layout: Layout, mesh: ParallelMesh) -> tuple[Engine, ExpertWeights]:
    view = mesh.expert_view(layout.ep)
    weights = placed(module, mesh, view)
    return shard(module, module.parallel_blocks(), mesh.shard_mesh, layout.options, [view]), weights


def on_ranks(rank: int, layout: Layout, mesh: ParallelMesh, steps: int = 3) -> Run:
    """The same on ranks, each with its own microbatches; those that hold copies start from other values."""
    torch.set_num_threads(1)
    alike = not layout.options.synchronize or rank < layout.ep
    module, run = make(layout, seed=0 if alike else 100 + rank), Run()
    engine, _ = engine_of(module, layout, mesh)
    optimizer = optimizer_of(module, layout.optimizer)
    with torch.inference_mode():  # as Lightning's sanity check
        module.loss(inputs(0, 0, rank), rank)
    for step in range(steps):
        total = 0.0
        for microbatch in range(layout.accumulation):
            engine.begin(last=microbatch == layout.accumulation - 1)
            loss = module.loss(inputs(step, microbatch, rank), rank) / layout.accumulation
            if microbatch == 0:
                optimizer.zero_grad()
            loss.backward()
            total += loss.item()
        engine.wait()
        run.losses.append(total)
        run.gradients.append({n: None if p.grad is None else whole(p.grad) for n, p in module.named_parameters()})
        optimizer.step()
    run.parameters = {n: whole(p) for n, p in module.named_parameters()}
    engine.close()
    return run


def on_ranks_each(rank: int, layouts: Sequence[Layout]) -> list[Run]:
    """`on_ranks` for several layouts in one world: starting one takes longer than these runs."""
    meshes = {sizes: mesh_of(sizes) for sizes in dict.fromkeys(layout.sizes for layout in layouts)}
    return [on_ranks(rank, layout, meshes[layout.sizes]) for layout in layouts]

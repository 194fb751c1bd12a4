"""A module as a user writes it, and the crudest tensor parallelism of it: every way in which a weight can be cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_5d.mesh import ParallelMesh
from lightning_5d.parallelism import Dtypes, Parallelism, Parallelized
from lightning_5d.plan import ParallelPlan
from lightning_5d.tensor_parallel.axis import TensorAxis, open_axis
from lightning_5d.tensor_parallel.layout import TensorLayout
from lightning_5d.tensor_parallel.rows import Rows, even
from lightning_5d.tensor_parallel.state import PlacedWeights
from tests.modules import VOCABULARY

WIDTH, HEADS, GROUPS, SIZE, HIDDEN = 8, 4, 2, 3, 4


class Mixer(nn.Module):
    """Heads with shared values beside a gated layer, and one projection of both."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * SIZE)
        self.v = nn.Linear(WIDTH, GROUPS * SIZE)
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.head_scale = nn.Parameter(torch.empty(SIZE))
        self.strength = nn.Parameter(torch.empty(()))
        self.down = nn.Linear(HEADS * SIZE + HIDDEN, WIDTH)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.head_scale.copy_(torch.rand(SIZE) + 0.5)
        self.strength.fill_(0.7)

    def forward(self, x: Tensor) -> Tensor:
        q = torch.tanh(self.q(x)).unflatten(-1, (-1, SIZE)) * self.head_scale
        v = self.v(x).unflatten(-1, (-1, SIZE))
        heads = (q * v.repeat_interleave(q.shape[-2] // v.shape[-2], -2)).flatten(-2)
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(torch.cat([heads, F.silu(gate) * up * self.strength], -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixer = Mixer()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


class Parted(L.LightningModule):
    def __init__(self, layers: int = 2, seed: int = 0, tied: bool = True, frozen: Sequence[str] = ()) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.temperature = nn.Parameter(torch.empty(()))
        self.reset_parameters()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        for name, parameter in self.named_parameters():
            if any(part in name for part in frozen):
                parameter.requires_grad_(False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.temperature.fill_(1.3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x * self.temperature)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> Any:
        named = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        decay = [p for name, p in named if p.ndim > 1]
        rest = [p for name, p in named if p.ndim <= 1]
        return torch.optim.AdamW([{"params": rest, "weight_decay": 0.0}, {"params": decay}], lr=0.02, weight_decay=0.1)


def layout_for(module: nn.Module, size: int) -> TensorLayout:
    """How `size` ranks store its weights."""
    weights: dict[str, Rows] = {}
    partial = set()
    padded = -(-VOCABULARY // size) * size
    vocabulary = Rows(0, VOCABULARY, (*range(VOCABULARY), *[-1] * (padded - VOCABULARY)))
    weights["embed.weight"] = weights["head.weight"] = vocabulary
    copies = max(size // GROUPS, 1)
    groups = [row for group in range(GROUPS) for _ in range(copies) for row in range(group * SIZE, (group + 1) * SIZE)]
    v = Rows(0, GROUPS * SIZE, tuple(groups), copies) if copies > 1 else even(0, GROUPS * SIZE)
    mine = HIDDEN // size
    halves = [half * HIDDEN + rank * mine + i for rank in range(size) for half in range(2) for i in range(mine)]
    features = HEADS * SIZE // size
    mixed = [
        place
        for rank in range(size)
        for place in (
            *range(rank * features, (rank + 1) * features),
            *range(HEADS * SIZE + rank * mine, HEADS * SIZE + (rank + 1) * mine),
        )
    ]
    for name, part in module.named_modules():
        if isinstance(part, Mixer):
            weights |= {f"{name}.q.weight": even(0, HEADS * SIZE), f"{name}.q.bias": even(0, HEADS * SIZE)}
            weights |= {f"{name}.v.weight": v, f"{name}.v.bias": v}
            weights[f"{name}.gate_up.weight"] = Rows(0, 2 * HIDDEN, tuple(halves))
            weights[f"{name}.down.weight"] = Rows(1, HEADS * SIZE + HIDDEN, tuple(mixed))
            partial |= {f"{name}.head_scale", f"{name}.strength"}
    return TensorLayout(weights=weights, partial=frozenset(partial))


class Enter(torch.autograd.Function):
    """Identity, whose gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.axis.sum(grad), None


class Leave(torch.autograd.Function):
    """The sum over ranks, whose gradient is the same on each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        return axis.sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class Gathered(torch.autograd.Function):
    """The ranks' last dimensions, one after the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return axis.gather(x, x.ndim - 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.chunk(ctx.axis.size, -1)[ctx.axis.rank].contiguous(), None


def compute_locally(module: nn.Module, axis: TensorAxis) -> None:
    """Makes a `Parted`, or a stage of it, compute with its rank's parts of weights."""

    def row(linear: nn.Linear, _: Any, out: Tensor) -> Tensor:
        return Leave.apply(out - linear.bias, axis) + linear.bias

    for part in module.modules():
        if isinstance(part, Mixer):
            part.register_forward_pre_hook(lambda _, args: (Enter.apply(args[0], axis),))
            part.down.register_forward_hook(row)
    embed, head = module.embed, module.head
    if any(True for _ in embed.parameters()):  # else it is on another stage

        def lookup(ids: Tensor) -> Tensor:
            rows = embed.weight.shape[0]
            local = ids - axis.rank * rows
            mine = (local >= 0) & (local < rows)
            found = F.embedding(local.clamp(0, rows - 1), embed.weight) * mine.unsqueeze(-1)
            return Leave.apply(found, axis)

        embed.forward = lookup
    if any(True for _ in head.parameters()):
        head.register_forward_pre_hook(lambda _, args: (Enter.apply(args[0], axis),))
        head.register_forward_hook(lambda _, args, out: Gathered.apply(out, axis)[..., :VOCABULARY])


@dataclass(frozen=True)
class Parts(Parallelism):
    """The plugin."""

    axis: ClassVar[str] = "tensor"
    order: ClassVar[int] = 20
    size: int = 2

    def mesh_sizes(self) -> dict[str, Any]:
        return {"tp": self.size}

    def parallelize(self, module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, dtypes: Dtypes) -> Parallelized:
        axis = open_axis(mesh.group("tp"), mesh.device)
        compute_locally(module, axis)
        return PlacedWeights(module, layout_for(module, self.size), axis, mesh)

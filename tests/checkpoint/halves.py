"""A module whose layers need not wait for each other, and the crudest cut of it: what a rank does not hold is gone."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_5d.checkpoint.stages import Stages
from lightning_5d.mesh import ParallelMesh
from lightning_5d.parallelism import Dtypes, Parallelism, Parallelized
from lightning_5d.pipeline_parallel.shared_weights import SharedWeights
from lightning_5d.pipeline_parallel.stage.placeholders import accepting_empty
from lightning_5d.plan import ParallelPlan

WIDTH = 6


class Gone(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(())


class Term(nn.Module):
    """One summand of the loss."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, WIDTH) / 3)
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return torch.tanh(x @ self.weight.T + self.bias).pow(2).mean()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight - x).pow(2).mean()


class Sum(L.LightningModule):
    """The loss is the sum of what its layers make of the batch; the head's weight is the first layer's."""

    def __init__(self, layers: int = 4, seed: int = 0, how: str = "adam", frozen: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = Head()
        self.layers = nn.ModuleList(Term(WIDTH + index) for index in range(layers))
        self.last = Head()
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(3))
        self.how = how
        for child in [self.first, *self.layers][:frozen]:
            child.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        terms = [self.first(batch), *(layer(batch) for layer in self.layers), self.last(batch.flip(-1))]
        return torch.stack(terms).sum() + (self.scale.pow(2).sum() / 10 if self._first_here() else 0.0)

    def _first_here(self) -> bool:
        return not isinstance(self.first, Gone)

    def configure_optimizers(self) -> Any:
        named = {name: p for name, p in self.named_parameters() if p.requires_grad}
        if self.how == "sgd":
            return torch.optim.SGD(named.values(), lr=0.1, momentum=0.9)
        if self.how == "names":  # the head's name is the first layer's in one process
            kept = [p for name, p in named.items() if name.startswith("first.")]
            others = [p for name, p in named.items() if not name.startswith("first.")]
            return torch.optim.AdamW([{"params": kept, "lr": 0.005}, {"params": others}], lr=0.02)
        if self.how == "layers":
            groups = []
            for index, layer in enumerate(self.layers):
                mine = [p for p in layer.parameters() if any(p is q for q in named.values())]
                groups.append({"params": mine, "lr": 0.01 * 0.9**index})
                for p in mine:
                    named = {name: q for name, q in named.items() if q is not p}
            groups.append({"params": list(named.values())})
            optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=0.02)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]
        decay = [p for p in named.values() if p.ndim > 1]
        rest = [p for p in named.values() if p.ndim <= 1]
        groups = [{"params": rest, "weight_decay": 0.0}, {"params": decay}]
        optimizer = torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


def batches(count: int = 8) -> list[Tensor]:
    return list(torch.randn(count, 3, WIDTH, generator=torch.Generator().manual_seed(5)))


def loader(count: int = 8) -> DataLoader[Tensor]:
    return DataLoader(batches(count), batch_size=None)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Halves(Parallelism):
    """Stage 0 has the first layer and half of the others, stage 1 the rest."""

    axis: ClassVar[str] = "pipeline"
    order: ClassVar[int] = 10
    copies: int = 1

    def mesh_sizes(self) -> dict[str, Any]:
        return {"pp": 2}

    def parallelize(self, module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, dtypes: Dtypes) -> Parallelized:
        return Half(module, mesh, self.copies)


class Half(Parallelized):
    def __init__(self, module: Any, mesh: ParallelMesh, copies: int) -> None:
        self._mesh = mesh
        self._stages = Stages.of(module, mesh)
        half = len(module.layers) // 2
        owners: dict[str, tuple[int, ...]] = {}
        for name, _ in module.named_parameters(remove_duplicate=False):
            layer = int(name.split(".")[1]) if name.startswith("layers.") else -1
            owners[name] = (0,) if layer < half and layer >= 0 else (1,) if layer >= half else (0, 1)
        placement = [(0, 1), (1, 0)][:copies]
        stage = mesh.rank("pp")
        if copies == 1:
            gone = range(half, len(module.layers)) if stage == 0 else range(half)
            for index in gone:
                module.layers[index] = Gone()
            if stage == 0:
                module.last = Gone()
            else:
                module.first = Gone()
        self.shared = SharedWeights(module, self._stages.first_names, owners, placement, mesh)

    def stages(self) -> Stages | None:
        return self._stages

    def call(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        mine = step(*args, **kwargs)
        whole = mine.detach().clone()
        dist.all_reduce(whole, group=self._mesh.group("pp"))
        return mine + (whole - mine.detach())

    def finalize_gradients(self) -> None:
        self.shared.sum_gradients()

    def gradient_axes(self, parameter: Tensor) -> Sequence[str] | None:
        return self.shared.gradient_axes(parameter)

    def optimizer_context(self) -> AbstractContextManager[None]:
        return accepting_empty(self._mesh.device)

    def optimizer_problems(self, optimizers: Sequence[Optimizer]) -> list[Any]:
        self.shared.synchronize()
        self.shared.check_equal()
        return self.shared.settle_groups(optimizers)

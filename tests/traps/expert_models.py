"""Small modules with experts: ones whose gradients can be computed in the head, and ones that draw random numbers."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from tests.tensor_parallel.parity import whole
from tests.traps.test_pipeline import Stepping

WIDTH, VOCABULARY = 8, 7


class Slopes(nn.Module):
    """Each expert is one number; its gradient is the sum of its tokens, and nothing but that depends on them."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, 1))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = Stepping.apply(self.weight[index], hidden[:, None])
        return (out * weights[..., None]).sum(1)


class Layer(nn.Module):
    """Sends each token to the expert it names; or has a vector and a scalar, whose gradients are 3, 0, 0, 4 and 0."""

    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        if experts:
            self.experts = Slopes(experts)
        else:
            self.vector, self.scalar = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        if hasattr(self, "experts"):
            index = batch[:, :1].long()
            return x + self.experts(batch[:, 1:], index, torch.ones_like(batch[:, :1]))[:, 0]
        factors = torch.tensor([3.0, 0.0, 0.0, 4.0])
        return x + Stepping.apply(self.vector, factors).sum() + Stepping.apply(self.scalar, torch.zeros(()))


class Sloped(L.LightningModule):
    """A layer with four experts and a dense one."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(4), Layer()])
        if frozen:
            self.layers[0].requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch[:, 1] * 0
        for layer in self.layers:
            x = layer(x, batch)
        return x.mean()

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Tokens(L.LightningDataModule):
    """For each step, the tokens (expert, value) of each data rank, twice over; values are as the ranks' mean would have them."""

    def __init__(self, steps: list[list[tuple[int, float]]]) -> None:
        super().__init__()
        self.steps = steps

    def train_dataloader(self) -> DataLoader[Tensor]:
        strategy: Any = self.trainer.strategy  # type: ignore[union-attr]
        place = strategy.distributed_sampler_kwargs
        ranks = place["num_replicas"]
        rows = []
        for tokens in self.steps:
            padded = [*tokens, *[(0, 0.0)] * (ranks - len(tokens))]
            expert, value = padded[place["rank"]]
            rows.append(torch.tensor([[float(expert), value * ranks]] * 2))
        return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]


class Dropping(nn.Dropout):
    """Keeps its masks as tensors: none of their numbers is taken out of torch where ranks have parts of sequences."""

    def __init__(self, p: float) -> None:
        super().__init__(p)
        self.drawn: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        mask = super().forward(torch.ones_like(x))
        self.drawn.append(mask.detach().clone())
        return x * mask


class DroppingExperts(nn.Module):
    """A loop over stacked weights, with dropout inside of each."""

    def __init__(self, experts: int, dropout: float) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) * 0.3)
        self.inside = Dropping(dropout)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, place = torch.where(index == expert)
            if len(token):  # as Hugging Face's loop leaves idle ones out
                y = self.inside(F.gelu(hidden[token] @ self.up[expert])) @ self.down[expert]
                out = out.index_add(0, token, y * weights[token, place, None])
        return out


class Jittered(nn.Module):
    """A router that shakes its input, as Mixtral's with ``router_jitter_noise``."""

    def __init__(self, experts: int, noise: float) -> None:
        super().__init__()
        self.top_k, self.noise = 2, noise
        self.weight = nn.Parameter(torch.randn(experts, WIDTH))
        self.drawn: list[Tensor] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.noise and self.training:
            jitter = torch.empty_like(x).uniform_(1.0 - self.noise, 1.0 + self.noise)
            self.drawn.append(jitter.detach().clone())
            x = x * jitter
        weights, index = F.linear(x, self.weight).softmax(-1).topk(self.top_k, -1)
        return index, weights


class Sparse(nn.Module):
    def __init__(self, dropout: float, noise: float) -> None:
        super().__init__()
        self.gate, self.experts = Jittered(4, noise), DroppingExperts(4, dropout)

    def forward(self, x: Tensor) -> Tensor:
        index, weights = self.gate(x)
        return self.experts(x.flatten(0, 1), index.flatten(0, 1), weights.flatten(0, 1)).view_as(x)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, dropout: float, noise: float) -> None:
        super().__init__()
        self.norm, self.mlp, self.moe = nn.LayerNorm(WIDTH), MLP(), Sparse(dropout, noise)
        self.residual = Dropping(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(x)
        return x + self.residual(self.moe(self.norm(x)))


class Drawing(L.LightningModule):
    """A language model that draws random numbers before, inside and behind its experts."""

    plan = {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}

    def __init__(self, dropout: float = 0.5, noise: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout, noise) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.gradients: list[Any] = []
        self.read: list[list[int]] = []

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(whole(self.trainer, {name: p.grad for name, p in self.named_parameters() if p.numel()}))

    def drawn(self) -> dict[str, list[Any]]:
        """What was drawn, by place."""
        found = {n: m.drawn for n, m in self.named_modules() if isinstance(m, Dropping | Jittered)}
        return {name: [tuple(each.flatten().tolist()) for each in drawn] for name, drawn in found.items()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Numbered(L.LightningDataModule):
    """Rows of tokens whose first is the row's number, dealt out to data ranks."""

    def __init__(self, rows: int, batch: int) -> None:
        super().__init__()
        self.rows, self.batch = torch.arange(rows)[:, None].repeat(1, 6), batch

    def train_dataloader(self) -> DataLoader[Tensor]:
        place = self.trainer.strategy.distributed_sampler_kwargs  # type: ignore[union-attr,attr-defined]
        return DataLoader(self.rows, self.batch, sampler=DistributedSampler(self.rows, shuffle=True, **place))  # type: ignore[arg-type]

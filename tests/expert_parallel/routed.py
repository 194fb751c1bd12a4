"""A small language model whose layers have experts, in one file of ordinary modules, and the choices it has made."""

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, INNER = 13, 8, 6


class Experts(nn.Module):
    """As Hugging Face has them: a loop over stacked weights."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * INNER, WIDTH) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(experts, WIDTH, INNER) * 0.3)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, place = torch.where(index == expert)
            gate, up = F.linear(hidden[token], self.gate_up_proj[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.down_proj[expert]) * weights[token, place, None]
            out = out.index_add(0, token, y)
        return out


class Router(nn.Module):
    def __init__(self, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.randn(experts, WIDTH))
        self.register_buffer("e_score_correction_bias", torch.linspace(-0.5, 0.5, experts))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(hidden, self.weight).sigmoid()
        index = (scores + self.e_score_correction_bias).topk(self.top_k, -1).indices
        return index, scores.gather(1, index)


class Block(nn.Module):
    def __init__(self, experts: int, top_k: int) -> None:
        super().__init__()
        self.gate = Router(experts, top_k)
        self.experts = Experts(experts)
        self.seen: list[Tensor] = []
        self.again: str | None = None

    def body(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        index, weights = self.gate(rows)
        if self.training:
            self.seen.append(index.detach().clone())
        return x + self.experts(rows, index, weights).view_as(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.again is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.again == "reentrant")


class Routed(L.LightningModule):
    """`layers` says how many experts each layer has."""

    def __init__(self, layers: tuple[int, ...] = (4, 6), top_k: int = 2, lr: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lr = lr
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(experts, top_k) for experts in layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def chosen(self, layer: int, calls: slice = slice(None)) -> list[int]:
        """How often each expert of a layer was chosen in these calls of it."""
        block = self.layers[layer]
        seen = torch.cat(block.seen[calls]).flatten()
        return torch.bincount(seen, minlength=block.experts.num_experts).tolist()

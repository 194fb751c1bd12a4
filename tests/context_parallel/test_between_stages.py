"""Blocks that hang directly on the LightningModule: each is a door, and stages pass sequences on as the step sees them."""

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_5d import ContextParallel, PipelineParallel
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import VOCABULARY, Dealt, Rows, compare

EXACT: dict[str, Any] = {"precision": "64-true", "tolerance": 1e-9}


class Layer(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Flat(L.LightningModule):
    """Its step calls every layer itself, and computes between them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(4))
        self.head = nn.Linear(width, VOCABULARY)
        for weight in self.parameters():  # so large that no gradient is rounding alone
            nn.init.normal_(weight, std=0.4)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = self.embed(batch["input_ids"])
        x = x + torch.linspace(0, 1, x.shape[1])[:, None]
        for layer in self.layers:
            x = 0.5 * x + layer(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Chain(Flat):
    """The same without anything between its layers."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = self.embed(batch["input_ids"])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize(
    ("schedule", "split"),
    [("1f1b", [2, 2]), ("1f1b", [0, 4]), ("zb_v", [1, 1, 1, 1])],
    ids=["1f1b", "nothing first", "zb_v"],
)
def test_stages_of_layers_that_the_step_calls_itself(ranks: RankPool, schedule: str, split: Any) -> None:
    pipeline = PipelineParallel(2, schedule=schedule, microbatches=2, split=split)
    compare(ranks, Chain, pipeline, ContextParallel(2), world=4, data=partial(Dealt, Rows(16, 7), 8), **EXACT)


@pytest.mark.parametrize("mode", [None, "full", "selective", 0.5])
def test_layers_that_the_step_calls_itself_run_again(ranks: RankPool, mode: Any) -> None:
    strategy = {"activation_checkpointing": mode}
    compare(ranks, Flat, ContextParallel(2), world=2, data=partial(Dealt, Rows(16, 7), 8), strategy=strategy, **EXACT)


@pytest.mark.parametrize("mode", ["full"])
def test_stages_that_run_again(ranks: RankPool, mode: Any) -> None:
    pipeline = PipelineParallel(2, schedule="zb_h1", microbatches=2)
    strategy = {"activation_checkpointing": mode}
    compare(
        ranks,
        Chain,
        pipeline,
        ContextParallel(2),
        world=4,
        data=partial(Dealt, Rows(16, 7), 8),
        strategy=strategy,
        **EXACT,
    )

"""Ordinary LightningModules, as a user writes them: nothing in them knows of any parallelism."""

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 13
LENGTH = 7


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class TinyLM(L.LightningModule):
    """A language model over rows of token ids; loss is the mean over its batch."""

    def __init__(self, layers: int = 3, width: int = 8, tied: bool = False, seed: int = 0, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).argmax(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


class Tokens(Dataset[Tensor]):
    """`count` rows of token ids; row i is a function of i and the seed."""

    def __init__(self, count: int, seed: int = 1) -> None:
        self.rows = torch.randint(0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def batches(count: int, size: int = 2, seed: int = 1) -> list[Tensor]:
    """`count` batches of token rows."""
    return list(Tokens(count * size, seed).rows.split(size))


def loader(count: int, batch_size: int = 2, seed: int = 1, **kwargs: object) -> DataLoader[Tensor]:
    """A plain loader over `count` rows, in order."""
    return DataLoader(Tokens(count, seed), batch_size=batch_size, **kwargs)  # type: ignore[arg-type]


class Line(L.LightningModule):
    """One weight whose gradient is the mean of its batch: steps can be computed in the head."""

    def __init__(self, lr: float = 0.1, gamma: float = 1.0) -> None:
        super().__init__()
        self.lr, self.gamma = lr, gamma
        self.w = nn.Parameter(torch.zeros(1))
        self.seen: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.w * batch).mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        grad = self.w.grad
        self.seen.append(float(grad.full_tensor() if hasattr(grad, "full_tensor") else grad))  # type: ignore[arg-type,union-attr]

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=self.gamma)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

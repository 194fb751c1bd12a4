"""One run under FiveD and one in one process, and how far apart they are."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_5d import FiveD
from lightning_5d.models import DecoderConfig, LanguageModel
from tests.pipeline_parallel.recorded import Record
from tests.ranks.pool import RankPool
from tests.trainers import quiet

SEPARATE: dict[str, Any] = {"backend": None, "timeout": 90.0}
VOCABULARY = 13
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "initializer_std": 0.2,
    "tie_embeddings": False,
}


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of tokens with their targets."""

    def __init__(self, count: int, tokens: int, vocabulary: int = VOCABULARY) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, vocabulary, (count, tokens + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index, :-1], "labels": self.ids[index, 1:]}


class Dealt(L.LightningDataModule):
    """Rows in order, dealt out to data ranks: together they read what one process reads in bigger batches."""

    def __init__(self, rows: Dataset[Any], batch_size: int) -> None:
        super().__init__()
        self.rows, self.batch_size = rows, batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        strategy = self.trainer.strategy  # type: ignore[union-attr]
        place = strategy.distributed_sampler_kwargs if isinstance(strategy, FiveD) else {"num_replicas": 1, "rank": 0}
        sampler: Any = DistributedSampler(self.rows, shuffle=False, **place)
        return DataLoader(self.rows, batch_size=self.batch_size // place["num_replicas"], sampler=sampler)

    val_dataloader = train_dataloader


class WholeRecord(Record):
    """Keeps gradients and parameters whole, on rank 0, each weight once."""

    def named(self, module: L.LightningModule) -> dict[str, Tensor]:
        return {name: p for name, p in module.named_parameters() if p.numel()}

    def kept(self, trainer: L.Trainer, values: dict[str, Tensor]) -> dict[str, Tensor]:
        return whole(trainer, values)


def whole(trainer: L.Trainer, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Whole copies by name, on rank 0."""
    found = trainer.strategy.by_parameter(values) if isinstance(trainer.strategy, FiveD) else values
    return {name: value.detach().clone() for name, value in found.items()} if trainer.is_global_zero else {}


def fit(rank: int, module: Callable[[], Any], data: Callable[[], Any], strategy: Any, **arguments: Any) -> Any:
    """Trains, inside a rank of a pool, or alone without a strategy."""
    record = WholeRecord()
    chosen = {"devices": 1} if strategy is None else {"strategy": strategy()}
    trainer = quiet(callbacks=[record], use_distributed_sampler=False, **{**chosen, **arguments})
    trainer.fit(module(), datamodule=data())
    return {**record(), "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()}}


def decoder(**changes: Any) -> Callable[[], LanguageModel]:
    """The reference model, tiny; parameters are large enough that no gradient is rounding alone."""
    return partial(_decoder, changes)


def _decoder(changes: Mapping[str, Any]) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(DecoderConfig(**{**SIZES, **changes}), {"lr": 3e-3, "warmup_steps": 2})


def compare(
    ranks: RankPool,
    module: Callable[[], Any],
    *plugins: Any,
    world: int,
    rows: int = 16,
    batch: int = 4,
    tokens: int = 6,
    vocabulary: int = VOCABULARY,
    data: Callable[[], Any] | None = None,
    tolerance: float = 1e-5,
    floor: float = 1e-6,
    strategy: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> dict[str, float]:
    """Trains under `plugins` on `world` ranks and alone, and compares everything.

    One batch is validated, in which everything runs that evaluation has of its own; its numbers are not compared.
    """
    deal = data or partial(_deal, rows, batch, tokens, vocabulary)
    common = {"gradient_clip_val": 0.5, "limit_val_batches": 1, **arguments}
    made = partial(FiveD, *plugins, **(strategy or {}))
    found = ranks(world, partial(fit, module=module, data=deal, strategy=made, devices=world, **common), **SEPARATE)
    expected = fit(0, module, deal, None, **common)
    differences = apart(found, expected, floor)
    assert max(differences.values()) < tolerance, differences
    return differences


def _deal(rows: int, batch: int, tokens: int, vocabulary: int) -> Dealt:
    return Dealt(Rows(rows, tokens, vocabulary), batch)


def apart(found: list[dict[str, Any]], expected: dict[str, Any], floor: float) -> dict[str, float]:
    """Largest differences relative to the largest magnitude of the expected tensor, or to `floor` if that is larger."""
    mine = found[0]
    wide = partial(torch.tensor, dtype=torch.float64)
    losses = wide([each["losses"] for each in found]).mean(0)
    differences = {
        "losses": _relative(losses, wide(expected["losses"]), 0.0),
        "norms": max(_relative(wide(r["norms"]), wide(expected["norms"]), 0.0) for r in found),
        "gradients": 0.0,
        "parameters": _worst(mine["parameters"], expected["parameters"], floor),
    }
    assert len(mine["gradients"]) == len(expected["gradients"]) > 0
    for got, wanted in zip(mine["gradients"], expected["gradients"], strict=True):
        differences["gradients"] = max(differences["gradients"], _worst(got, wanted, floor))
    return differences


def _worst(found: dict[str, Tensor], expected: dict[str, Tensor], floor: float) -> float:
    assert set(found) == set(expected), set(found) ^ set(expected)
    return max(_relative(found[name], expected[name], floor) for name in expected)


def _relative(found: Tensor, expected: Tensor, floor: float) -> float:
    if found.shape != expected.shape:
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=floor))

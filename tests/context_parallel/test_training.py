"""A Trainer whose ranks hold parts of sequences trains as one process: losses, every gradient, norms, parameters after four steps."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_5d import ContextParallel, FiveD, ZeRO
from lightning_5d.models import DecoderConfig, LanguageModel
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, SIZES, Dealt, Rows, apart, compare, decoder, fit

METHODS: dict[str, dict[str, Any]] = {
    "ring zigzag": {},
    "ring contiguous": {"balance": "contiguous"},
    "ulysses": {"method": "ulysses"},
    "all_gather zigzag": {"method": "all_gather"},
    "all_gather contiguous": {"method": "all_gather", "balance": "contiguous"},
}


class Uneven(Rows):
    """Rows of which other tokens count in each, in some none; the end of all rows counts little."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        tokens = len(row["labels"])
        counts = torch.arange(tokens) < 1 + (3 * index) % tokens
        return {"input_ids": row["input_ids"], "labels": row["labels"].masked_fill(~counts, -100)}


def uneven(count: int = 16, batch: int = 4, tokens: int = 16) -> Dealt:
    return Dealt(Uneven(count, tokens), batch)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_and_balance(ranks: RankPool, method: str, size: int) -> None:
    compare(ranks, decoder(), ContextParallel(size, **METHODS[method]), world=size, data=uneven)


def test_the_mixture_of_heads_and_ring(ranks: RankPool) -> None:
    compare(ranks, decoder(), ContextParallel(4, ulysses=2), world=4, data=uneven)


@pytest.mark.parametrize("tokens", [9, 13, 15])
@pytest.mark.parametrize("method", ["ring zigzag", "ulysses", "all_gather zigzag"])
def test_lengths_that_the_ranks_do_not_divide(ranks: RankPool, method: str, tokens: int) -> None:
    compare(ranks, decoder(), ContextParallel(4, **METHODS[method]), world=4, data=partial(uneven, tokens=tokens))


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
@pytest.mark.parametrize("method", ["ring zigzag", "ulysses"])
def test_numbers_of_key_and_value_heads(ranks: RankPool, method: str, heads: tuple[int, int]) -> None:
    model = decoder(num_heads=heads[0], num_kv_heads=heads[1])
    compare(ranks, model, ContextParallel(4, **METHODS[method]), world=4, data=uneven)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_context_ranks_join_the_data_ranks(ranks: RankPool, stage: int) -> None:
    plugins = ContextParallel(2), ZeRO(stage=stage)
    compare(ranks, decoder(tie_embeddings=stage == 2), *plugins, world=4, tokens=8, accumulate_grad_batches=2)


def test_replicated_groups_of_shards(ranks: RankPool) -> None:
    plugins = ContextParallel(2), ZeRO(stage=3, replicate=2)
    compare(ranks, decoder(), *plugins, world=8, rows=32, batch=8, tokens=8)


class Weighted(LanguageModel):
    """Says how many tokens count, as steps do whose batches differ in that."""

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "weight": (batch["labels"] != -100).sum()}


def weighted() -> Weighted:
    torch.manual_seed(0)
    return Weighted(DecoderConfig(**SIZES), {"lr": 3e-3, "warmup_steps": 2})


def compare_weighted(ranks: RankPool, *plugins: Any) -> dict[str, float]:
    """Four ranks, two of them with other samples, against one process that reads their batches as one."""
    call = partial(fit, module=weighted, data=uneven, limit_val_batches=1)
    found = ranks(4, partial(call, strategy=partial(FiveD, *plugins), devices=4), **SEPARATE)
    expected = call(0, strategy=None)
    differences = apart(found, expected, 1e-6)
    differences.pop("losses")  # of each data rank's own samples
    return differences


@pytest.mark.parametrize("stage", [1, 3])
def test_data_ranks_with_other_numbers_of_tokens(ranks: RankPool, stage: int) -> None:
    found = compare_weighted(ranks, ContextParallel(2), ZeRO(stage=stage))
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
@pytest.mark.parametrize("method", ["ring zigzag", "ulysses"])
def test_blocks_that_are_computed_again(ranks: RankPool, method: str, checkpointing: str) -> None:
    strategy = {"activation_checkpointing": checkpointing}
    compare(ranks, decoder(), ContextParallel(2, **METHODS[method]), world=2, data=uneven, strategy=strategy)

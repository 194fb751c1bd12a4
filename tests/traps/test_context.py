"""Section H, and what of D, E, F and N is about the context axis: who counts which token, positions, masks, lengths, dropout."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_5d import ContextParallel, FiveD, PipelineParallel, ZeRO
from lightning_5d.launch.failure import RankFailure
from lightning_5d.models import Decoder, DecoderConfig
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SIZES, Dealt, Rows, compare, decoder, fit
from tests.trainers import quiet
from tests.traps.noted import Noted
from tests.traps.replicas import TRAINER

WIDTH = 8
METHODS = pytest.mark.parametrize("method", ["ring", "ulysses", "all_gather"])


class Block(nn.Module):
    """Attention of two heads, and dropout behind it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = Noted(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.dropout(self.out(seen.transpose(1, 2).flatten(2)))


class Model(nn.Module):
    """Blocks that know positions by what they see alone."""

    def __init__(self, dropout: float, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Language(L.LightningModule):
    def __init__(self, dropout: float = 0.0, vocabulary: int = 13) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Model(dropout, vocabulary)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return F.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Losses(nn.Module):
    """What each token costs is written down by its id; attention is there, and adds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.costs, self.block = nn.Embedding(8, 1), Block(0.0)
        with torch.no_grad():
            self.costs.weight.copy_(torch.tensor([4.0, 9, 9, 9, 1, 1, 1, 9])[:, None])

    def forward(self, ids: Tensor) -> Tensor:
        costs: Tensor = self.costs(ids)[..., 0]
        return costs + 0.0 * self.block(costs.unsqueeze(-1).expand(-1, -1, WIDTH)).sum(-1)


class Counted(L.LightningModule):
    """The mean over the tokens that count, as people write it."""

    def __init__(self, way: str, weighted: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.way, self.weighted = Losses(), way, weighted
        self.seen: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        costs, counts = self.model(batch["input_ids"]), batch["labels"] != -100
        if self.way == "selected":
            loss = costs[counts].mean()
        elif self.way == "masked":
            loss = (costs * counts).sum() / counts.sum()
        else:
            loss = costs.masked_fill(~counts, 0.0).sum() / counts.float().sum()
        self.seen.append(float(loss.detach()))
        return {"loss": loss, "weight": counts.sum()} if self.weighted else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Fixed(Dataset[dict[str, Tensor]]):
    """Rows with the same ids; the given positions count in each."""

    def __init__(self, counted: list[list[int]]) -> None:
        self.counted = counted

    def __len__(self) -> int:
        return len(self.counted)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.arange(8)
        return {"input_ids": ids, "labels": torch.where(torch.isin(ids, torch.tensor(self.counted[index])), ids, -100)}


EXPECTED = torch.tensor([0.25, 0, 0, 0, 0.25, 0.25, 0.25, 0])[:, None]


def _costs(
    rank: int, module: Any, plugins: Any, devices: int, counted: list[list[int]], batch: int, **flags: Any
) -> Any:
    made = module()
    strategy = partial(FiveD, *plugins)
    run = fit(rank, lambda: made, partial(Dealt, Fixed(counted), batch), strategy, devices=devices, **flags)
    return made.seen, run["gradients"][0].get("model.costs.weight")


WAYS = pytest.mark.parametrize("way", ["selected", "masked", "filled"])


@WAYS
@pytest.mark.parametrize("balance", ["contiguous", "zigzag"])
def test_16_ranks_of_a_sequence_with_other_numbers_of_tokens_that_count(
    ranks: RankPool, way: str, balance: Any
) -> None:
    """A rank whose one token costs 4 beside one whose three cost 1: 1.75, and not 2.5."""
    plugins = (ContextParallel(2, balance=balance),)
    found = ranks(2, _costs, partial(Counted, way), plugins, 2, [[0, 4, 5, 6]], 1, **TRAINER)
    assert [losses for losses, _ in found] == [[1.75], [1.75]]
    torch.testing.assert_close(found[0][1], EXPECTED, rtol=1e-6, atol=1e-7)


@WAYS
def test_17_a_row_and_a_rank_without_a_token_that_counts(ranks: RankPool, way: str) -> None:
    plugins = (ContextParallel(2, balance="contiguous"),)
    found = ranks(2, _costs, partial(Counted, way), plugins, 2, [[0, 1, 2, 3], []], 2, **TRAINER)
    assert [losses for losses, _ in found] == [[7.75], [7.75]]
    expected = torch.tensor([0.25] * 4 + [0.0] * 4)[:, None]
    torch.testing.assert_close(found[0][1], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("devices", "batch", "flags"),
    [(4, 2, {}), (2, 1, {"accumulate_grad_batches": 2})],
    ids=["data ranks", "accumulated"],
)
def test_17_a_batch_without_a_token_that_counts(
    ranks: RankPool, devices: int, batch: int, flags: dict[str, Any]
) -> None:
    module, plugins = partial(Counted, "masked", weighted=True), (ContextParallel(2), ZeRO(stage=1))
    found = ranks(devices, partial(_costs, **flags), module, plugins, devices, [[0, 4, 5, 6], []], batch, **TRAINER)
    torch.testing.assert_close(found[0][1], EXPECTED, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "plugins", [(ContextParallel(2),), (ContextParallel(2), ZeRO(stage=1))], ids=["cp2", "dp2 x cp2"]
)
def test_20_loss_gradients_and_norm_do_not_depend_on_the_layout(ranks: RankPool, plugins: Any) -> None:
    compare(ranks, Language, *plugins, world=2 * len(plugins), tokens=8, batch=4)


def test_20_four_data_ranks_are_two_with_two_context_ranks_each(ranks: RankPool) -> None:
    compare(ranks, Language, ZeRO(stage=1), world=4, tokens=8, batch=4)


class Sum(Language):
    """The loss is a sum of which each rank has a part."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.model(batch["input_ids"]).square().sum() * 1e-2


def test_26_the_gradient_of_a_sum_over_ranks_is_not_multiplied_by_their_number(ranks: RankPool) -> None:
    compare(ranks, Sum, ContextParallel(2), world=2, tokens=8)
    compare(ranks, Sum, ContextParallel(4), world=4, tokens=8)


def _masks(
    rank: int, plugins: Any, devices: int, save: str | None = None, resume: str | None = None, **flags: Any
) -> dict[str, list[Any]]:
    L.seed_everything(3, verbose=False)
    module = Language(dropout=0.5)
    trainer = quiet(strategy=FiveD(*plugins), devices=devices, accumulate_grad_batches=2, **flags)
    trainer.fit(module, datamodule=Dealt(Rows(16, 8), 4), ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)
    return {name: m.masks for name, m in module.named_modules() if isinstance(m, Noted)}


@METHODS
def test_31_masks_differ_on_chunks_of_a_sequence_replicas_layers_steps_and_microbatches(
    ranks: RankPool, method: Any
) -> None:
    found = ranks(4, _masks, (ZeRO(stage=1), ContextParallel(2, method=method)), 4, **TRAINER)
    every = [mask for masks in found for layer in masks.values() for mask in layer]
    assert len(set(every)) == len(every) == 4 * 2 * 4


def test_31_a_resumed_run_goes_on_with_the_masks_of_one_without_a_break(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    run = partial(ranks, 2, _masks, (ContextParallel(2),), 2, **TRAINER)
    straight, first, second = run(max_epochs=2), run(max_epochs=1, save=path), run(max_epochs=2, resume=path)
    for rank in range(2):
        assert straight[rank] == {name: first[rank][name] + second[rank][name] for name in first[rank]}


def _gradients(rank: int, plugins: Any, devices: int, checkpointing: Any) -> list[Tensor]:
    L.seed_everything(3, verbose=False)
    module = Language(dropout=0.5)
    seen: list[Tensor] = []

    class Gradients(L.Callback):
        def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
            local = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in module.parameters()]  # type: ignore[union-attr]
            seen.extend(each.detach().clone() for each in local)  # type: ignore[union-attr]

    strategy = FiveD(*plugins, activation_checkpointing=checkpointing)
    quiet(strategy=strategy, devices=devices, callbacks=[Gradients()]).fit(module, datamodule=Dealt(Rows(8, 8), 4))
    return seen


@pytest.mark.parametrize(
    "plugins", [(ContextParallel(2),), (ContextParallel(2), PipelineParallel(2, microbatches=2))], ids=["cp", "pp x cp"]
)
def test_32_recomputed_blocks_draw_their_old_masks(ranks: RankPool, plugins: Any) -> None:
    run = partial(ranks, 2 * len(plugins), _gradients, plugins, 2 * len(plugins), **TRAINER)
    kept = run(checkpointing=None)
    assert any(float(gradient.abs().max()) > 0 for gradient in kept[0])
    for checkpointing in ("full", "selective"):
        torch.testing.assert_close(run(checkpointing=checkpointing), kept, rtol=1e-6, atol=1e-7)


class Predictor(L.LightningModule):
    """Gives the logits of a decoder with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.decoder = Decoder(DecoderConfig(**SIZES))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits: Tensor = self.decoder(batch["input_ids"], batch.get("position_ids"))
        return logits


def _batches(tokens: int) -> list[dict[str, Tensor]]:
    ids = torch.arange(2 * tokens).view(2, tokens) % 13
    places = torch.arange(tokens)[None].expand(2, -1)
    restart = torch.where(places < tokens // 2, places, places - tokens // 2)
    return [
        {"input_ids": ids},
        {"input_ids": ids, "position_ids": places + 100},
        {"input_ids": ids, "position_ids": restart},
    ]


def _logits(rank: int, plugins: Any, devices: int, tokens: int) -> list[Tensor]:
    strategy: dict[str, Any] = {"strategy": FiveD(*plugins)} if plugins else {}
    trainer = quiet(devices=devices, use_distributed_sampler=False, **strategy)
    found = trainer.predict(Predictor(), DataLoader(_batches(tokens), batch_size=None))
    return [logits.clone() for logits in found or []]  # type: ignore[union-attr]


@METHODS
@pytest.mark.parametrize("tokens", [7, 8])
def test_37_positions_are_cut_with_their_tokens(ranks: RankPool, method: Any, tokens: int) -> None:
    expected = _logits(0, (), 1, tokens)
    assert not torch.allclose(expected[0], expected[2])
    for found in ranks(2, _logits, (ContextParallel(2, method=method),), 2, tokens, **TRAINER):
        assert [logits.shape for logits in found] == [(2, tokens, 13)] * 3
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [4, 5, 6, 7])
@METHODS
def test_40_no_token_vanishes_when_the_ranks_do_not_divide_a_length(ranks: RankPool, method: Any, tokens: int) -> None:
    compare(ranks, Language, ContextParallel(2, method=method), world=2, tokens=tokens)


def _too_short(rank: int, plugin: ContextParallel, tokens: int) -> str:
    with pytest.raises((MisconfigurationException, RankFailure)) as caught:
        quiet(strategy=FiveD(plugin), devices=2).fit(Language(), datamodule=Dealt(Rows(4, tokens), 2))
    return str(caught.value)


@pytest.mark.parametrize(
    ("plugin", "tokens", "words"),
    [
        (ContextParallel(2), 2, ["2 tokens", "4"]),
        (ContextParallel(2), 3, ["3 tokens", "4"]),
        (ContextParallel(2, balance="contiguous"), 1, ["1 token", "2"]),
        (ContextParallel(2, pad=False), 7, ["7 tokens", "8", "multiple of 4"]),
    ],
)
def test_40_a_length_that_cannot_be_cut_is_refused_with_the_numbers(
    ranks: RankPool, plugin: ContextParallel, tokens: int, words: list[str]
) -> None:
    for message in ranks(2, _too_short, plugin, tokens, **TRAINER):
        for word in words:
            assert word in message


class Reader(Language):
    def __init__(self) -> None:
        super().__init__(vocabulary=1000)
        self.read: list[list[int]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.read.append(batch["input_ids"][:, 0].tolist())
        return super().training_step(batch, batch_idx)


class Numbered(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.full((8,), index), "labels": torch.full((8,), index)}


def _read(rank: int, workers: int) -> list[list[int]]:
    L.seed_everything(3, workers=True, verbose=False)
    module = Reader()
    trainer = quiet(strategy=FiveD(ZeRO(stage=1), ContextParallel(2)), devices=4, max_epochs=2)
    trainer.fit(module, DataLoader(Numbered(), batch_size=2, shuffle=True, num_workers=workers))
    return module.read


@pytest.mark.parametrize("workers", [0, 2])
def test_76_ranks_of_one_sequence_read_the_same_samples_and_replicas_others(ranks: RankPool, workers: int) -> None:
    found = ranks(4, _read, workers, **TRAINER)
    assert found[0] == found[1]
    assert found[2] == found[3]
    for epoch in range(2):
        read = [index for rank in (0, 2) for batch in found[rank][4 * epoch : 4 * epoch + 4] for index in batch]
        assert sorted(read) == list(range(16))
    assert found[0][:4] != found[0][4:]


def test_decoders_train_alike(ranks: RankPool) -> None:
    """The model of the other files, here so that a fault of this file's own models is told apart."""
    compare(ranks, decoder(), ContextParallel(2), world=2, tokens=8)

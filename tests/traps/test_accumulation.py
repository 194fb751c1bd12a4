"""Sections C and D: the gradient of a window is the mean over what is in it, whatever its layout."""

import warnings
from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from tests.modules import Line
from tests.ranks.pool import RankPool
from tests.trainers import quiet, zero
from tests.traps.replicas import STAGES, TRAINER

ALONE = {**TRAINER, "env": {"WORLD_SIZE": None}}


def in_order(
    trainer: L.Trainer, rows: Sequence[Tensor], per_batch: int = 1, repeat: bool = False
) -> DataLoader[Tensor]:
    """Batch k of data rank r is the rows from (k * ranks + r) * per_batch on; with `repeat` each row is on all ranks."""
    # Lightning shuffles where it puts in a training sampler of its own.
    place = getattr(trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
    if repeat:
        rows = [row for row in rows for _ in range(place["num_replicas"])]
    sampler = DistributedSampler(rows, shuffle=False, **place)  # type: ignore[arg-type,var-annotated]
    return DataLoader(rows, batch_size=per_batch, sampler=sampler)  # type: ignore[arg-type]


class Numbered(L.LightningDataModule):
    """`count` microbatches per rank, each a row of ones times its number (from 1), the same on all data ranks."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def train_dataloader(self) -> DataLoader[Tensor]:
        assert self.trainer is not None
        return in_order(self.trainer, [torch.tensor([float(i)]) for i in range(1, self.count + 1)], repeat=True)


def _windows(rank: int, stage: int | None, ranks: int, count: int, flags: dict[str, Any]) -> dict[str, Any]:
    trainer = quiet(**flags) if stage is None else zero(stage, ranks, **flags)
    module = Line()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, Numbered(count))
    told = [str(w.message) for w in caught if "accumulate_grad_batches" in str(w.message)]
    return {"seen": module.seen, "steps": trainer.global_step, "told": told}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_14_a_window_longer_than_the_epoch_is_the_mean_over_the_epoch_and_warned_of_once(
    ranks: RankPool, world: int, stage: int
) -> None:
    flags = {"accumulate_grad_batches": 4, "max_epochs": 4}
    results = ranks(world, _windows, stage, world, 2, flags, **TRAINER)
    for result in results:
        assert result["seen"] == pytest.approx([1.5] * 4)
        assert result["steps"] == 4
    (message,) = results[0]["told"]
    assert "4" in message
    assert "2" in message
    assert all(not result["told"] for result in results[1:])


@pytest.mark.parametrize(
    ("accumulate", "count", "right"),
    [(4, 6, [2.5, 5.5]), (2, 5, [1.5, 3.5, 5.0]), (3, 3, [2.0]), (1, 2, [1.0, 2.0])],
)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_19_the_last_incomplete_window_is_divided_by_what_it_holds(
    ranks: RankPool, world: int, stage: int, accumulate: int, count: int, right: list[float]
) -> None:
    flags = {"accumulate_grad_batches": accumulate}
    for result in ranks(world, _windows, stage, world, count, flags, **TRAINER):
        assert result["seen"] == pytest.approx(right)
        assert result["steps"] == len(right)
        assert not result["told"]


# Rows of (token, label); label -100 is ignored.
IGNORED = -100


class Masked(L.LightningModule):
    """Mean cross entropy over the labels that count, which is 0/0 where none does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 5)
        self.gradients: list[dict[str, Tensor]] = []
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        ids, labels = batch[..., 0], batch[..., 1]
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        loss = F.cross_entropy(self.head(x).flatten(0, -2), labels.flatten(), ignore_index=IGNORED)
        return {"loss": loss, "weight": (labels != IGNORED).sum()}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        from lightning_5d.checkpoint.full_state import gather

        grads = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        self.gradients.append(gather(grads, keep=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def samples(valid: list[int]) -> Tensor:
    """One row of 4 tokens per entry, of which that many have a label."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 5, (len(valid), 4, 2), generator=generator)
    for row, count in zip(rows, valid, strict=True):
        row[count:, 1] = IGNORED
    return rows


class Microbatches(L.LightningDataModule):
    """Microbatch k of rank r is rows k*ranks + r; in one process one big batch per step."""

    def __init__(self, valid: list[int], per_batch: int) -> None:
        super().__init__()
        self.rows, self.per_batch = samples(valid), per_batch

    def train_dataloader(self) -> DataLoader[Tensor]:
        assert self.trainer is not None
        return in_order(self.trainer, list(self.rows), self.per_batch)


def _masked(rank: int, stage: int | None, ranks: int, valid: list[int], accumulate: int, per: int) -> Any:
    arguments: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    trainer = quiet(**arguments) if stage is None else zero(stage, ranks, **arguments)
    module = Masked()
    trainer.fit(module, Microbatches(valid, per))
    return {"gradients": module.gradients, "weights": _whole(module)}


def _whole(module: nn.Module) -> dict[str, Tensor]:
    from tests.trainers import whole

    return whole(module)


@pytest.mark.parametrize(
    ("valid", "world", "accumulate"),
    [
        pytest.param([1, 3], 1, 2, id="microbatches of 1 and 3 tokens"),
        pytest.param([1, 3], 2, 1, id="ranks of 1 and 3 tokens"),
        pytest.param([1, 3, 2, 4], 2, 2, id="both"),
        pytest.param([1, 3, 2], 3, 1, id="three ranks"),
        pytest.param([4, 0], 1, 2, id="a microbatch without tokens"),
        pytest.param([4, 0], 2, 1, id="a rank without tokens"),
        pytest.param([0, 4], 2, 1, id="rank 0 without tokens"),
        pytest.param([0, 0, 3, 1], 2, 2, id="a first microbatch without tokens anywhere"),
        pytest.param([3, 1, 0, 0], 2, 2, id="a last microbatch without tokens anywhere"),
    ],
)
@pytest.mark.parametrize("stage", STAGES)
def test_16_17_tokens_count_alike_wherever_they_are(
    ranks: RankPool, stage: int, valid: list[int], world: int, accumulate: int
) -> None:
    one = ranks(1, _masked, None, 1, valid, 1, len(valid), **ALONE)[0]
    for found in ranks(world, _masked, stage, world, valid, accumulate, 1, **TRAINER):
        torch.testing.assert_close(found["gradients"], one["gradients"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["weights"], one["weights"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("valid", [[4, 0, 4, 0], [4, 4, 0, 0]])
def test_17_a_sample_without_tokens_does_not_count(ranks: RankPool, valid: list[int], stage: int) -> None:
    one = ranks(1, _masked, None, 1, valid, 1, 4, **ALONE)[0]
    # Two rows in each microbatch: both have one without tokens, or one has no tokens at all.
    for found in ranks(2, _masked, stage, 2, valid, 1, 2, **TRAINER):
        torch.testing.assert_close(found["gradients"], one["gradients"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_17_a_step_without_any_token_leaves_weights_as_they_are(ranks: RankPool, stage: int) -> None:
    for found in ranks(2, _masked, stage, 2, [0, 0], 1, 1, **TRAINER):
        torch.testing.assert_close(found["weights"], _whole(Masked()), rtol=0, atol=0)

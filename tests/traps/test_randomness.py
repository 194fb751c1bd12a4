"""Section F: replicas start equal; random numbers differ where data differ, agree where they do not, and go on after a break."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.modules import TinyLM, loader
from tests.ranks.pool import RankPool
from tests.trainers import whole, zero
from tests.traps.replicas import STAGES, TRAINER, replicated


class OwnSeed(TinyLM):
    """Weights and a buffer that depend on the rank until FiveD has seen them."""

    def __init__(self, rank: int) -> None:
        super().__init__(seed=100 + rank)
        self.register_buffer("shift", torch.full((3,), float(rank)))
        self.start: dict[str, Tensor] = {}

    def on_fit_start(self) -> None:
        self.start = {**whole(self), "shift": self.shift.clone()}


def _started(rank: int, stage: int, ranks: int, replicate: int, axis: str | None) -> tuple[Any, Any]:
    torch.manual_seed(rank)
    trainer = replicated(stage, ranks, axis) if axis else zero(stage, ranks, replicate)
    module = OwnSeed(rank)
    trainer.fit(module, loader(8))
    return module.start, whole(module)


@pytest.mark.parametrize(
    ("world", "replicate", "axis"), [(2, 1, None), (3, 1, None), (4, 2, None), (4, 1, "tp"), (4, 1, "pp")]
)
@pytest.mark.parametrize("stage", STAGES)
def test_28_replicas_start_and_stay_equal_whatever_their_seeds(
    ranks: RankPool, stage: int, world: int, replicate: int, axis: str | None
) -> None:
    results = ranks(world, _started, stage, world, replicate, axis, **TRAINER)
    expected = {**dict(OwnSeed(0).named_parameters()), "shift": torch.zeros(3)}
    for start, end in results:
        torch.testing.assert_close(start, {k: v.detach() for k, v in expected.items()}, rtol=0, atol=0)
        torch.testing.assert_close(end, results[0][1], rtol=0, atol=0)


class Masks(L.LightningModule):
    """Records the dropout mask of two layers in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
        self.dropout = nn.Dropout(0.5)
        self.masks: list[list[bool]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = torch.ones(1, 32)
        total = batch.float().mean() * 0
        for layer in self.layers:
            mask = self.dropout(x)
            self.masks.append(mask.bool().flatten().tolist())
            total = total + layer(mask).mean()
        return total

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        torch.rand(7 + batch_idx)  # evaluation that draws numbers, too

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _masks(
    rank: int, stage: int, ranks: int, axis: str | None, flags: dict[str, Any], path: str | None = None
) -> list[list[bool]]:
    L.seed_everything(7, verbose=False)
    flags = {"max_epochs": 2, "accumulate_grad_batches": 2, **flags}
    trainer = replicated(stage, ranks, axis, **flags) if axis else zero(stage, ranks, **flags)
    module = Masks()
    save = flags["max_epochs"] == 1 and path is not None
    trainer.fit(module, loader(4 * ranks, 1), loader(2 * ranks, 1), ckpt_path=None if save else path)
    if save:
        trainer.save_checkpoint(path)
    return module.masks


def _all_differ(masks: list[list[bool]]) -> None:
    assert len({tuple(mask) for mask in masks}) == len(masks)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_31_masks_differ_between_data_ranks_layers_microbatches_and_epochs(
    ranks: RankPool, stage: int, world: int
) -> None:
    found = ranks(world, _masks, stage, world, None, {}, **TRAINER)
    assert [len(masks) for masks in found] == [16] * world
    _all_differ([mask for masks in found for mask in masks])


@pytest.mark.parametrize("stage", [0, 3])
def test_31_masks_agree_inside_a_replica(ranks: RankPool, stage: int) -> None:
    found = ranks(4, _masks, stage, 4, "tp", {}, **TRAINER)
    assert found[0] == found[1]
    assert found[2] == found[3]
    _all_differ(found[0] + found[2])


@pytest.mark.parametrize("stage", STAGES)
def test_31_a_resumed_run_goes_on_with_the_numbers_of_one_without_a_break(
    ranks: RankPool, tmp_path: Path, stage: int
) -> None:
    path = str(tmp_path / "half.ckpt")
    straight = ranks(2, _masks, stage, 2, None, {}, **TRAINER)
    first = ranks(2, _masks, stage, 2, None, {"max_epochs": 1}, path, **TRAINER)
    second = ranks(2, _masks, stage, 2, None, {}, path, **TRAINER)
    for rank in range(2):
        assert first[rank] + second[rank] == straight[rank]


def test_31_the_sanity_check_changes_no_mask(ranks: RankPool) -> None:
    without = ranks(2, _masks, 1, 2, None, {}, **TRAINER)
    assert ranks(2, _masks, 1, 2, None, {"num_sanity_val_steps": 2}, **TRAINER) == without


class Recomputed(TinyLM):
    """Blocks with dropout, whose activations may be recomputed in backward."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        for layer in self.layers:
            layer.dropout.p = 0.5  # type: ignore[union-attr]
        self.gradients: list[dict[str, Tensor]] = []

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        from lightning_5d.checkpoint.full_state import gather

        self.gradients.append(gather({n: p.grad for n, p in self.named_parameters()}, keep=True))


def _recomputed(rank: int, stage: int, recompute: bool) -> list[dict[str, Tensor]]:
    trainer = zero(stage, 2, accumulate_grad_batches=2)
    module = Recomputed(recompute)
    trainer.fit(module, loader(16))
    return module.gradients


@pytest.mark.parametrize("stage", STAGES)
def test_32_recomputed_blocks_draw_their_old_masks(ranks: RankPool, stage: int) -> None:
    kept = ranks(2, _recomputed, stage, False, **TRAINER)
    again = ranks(2, _recomputed, stage, True, **TRAINER)
    assert len(kept[0]) == 2
    torch.testing.assert_close(again, kept, rtol=1e-6, atol=1e-7)


class Augmented(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.cat([torch.tensor([float(index)]), torch.rand(2)])


class Reader(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.rows: list[list[float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.rows += batch.tolist()
        return self.w.sum() * batch.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _augmented(rank: int, axis: str | None, workers_seeded: bool) -> list[list[float]]:
    L.seed_everything(3, workers=workers_seeded, verbose=False)
    ranks = 4 if axis else 2
    trainer = replicated(1, ranks, axis) if axis else zero(1, ranks)
    module = Reader()
    trainer.fit(module, DataLoader(Augmented(), batch_size=1, shuffle=True, num_workers=1))
    return module.rows


@pytest.mark.parametrize("workers_seeded", [True, False])
def test_76_augmentation_in_workers_differs_between_data_ranks(ranks: RankPool, workers_seeded: bool) -> None:
    first, second = ranks(2, _augmented, None, workers_seeded, **TRAINER)
    assert {row[0] for row in first}.isdisjoint({row[0] for row in second})
    draws = [tuple(row[1:]) for row in first + second]
    assert len(set(draws)) == len(draws) == 12


@pytest.mark.parametrize("workers_seeded", [True, False])
def test_76_augmentation_in_workers_agrees_inside_a_replica(ranks: RankPool, workers_seeded: bool) -> None:
    found = ranks(4, _augmented, "tp", workers_seeded, **TRAINER)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert {row[1] for row in found[0]}.isdisjoint({row[1] for row in found[2]})

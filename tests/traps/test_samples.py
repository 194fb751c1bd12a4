"""Section N: which rank reads which sample, data that cannot be shared out, and `prepare_data`."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler

from tests.modules import TinyLM, loader
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.trainers import zero
from tests.traps.replicas import TRAINER, one_and_same, replicated

COUNT = 16


class Reader(L.LightningModule):
    """Notes the numbers of the samples it sees in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.epochs: list[list[int]] = []
        self.validated: list[int] = []

    def on_train_epoch_start(self) -> None:
        self.epochs.append([])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.epochs[-1] += batch.tolist()
        return self.w.sum() * batch.float().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated += batch.tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Backwards(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(reversed(range(COUNT)))

    def __len__(self) -> int:
        return COUNT


def _sampler(kind: str) -> Any:
    if kind == "own order":
        return Backwards()
    if kind == "own random":
        return RandomSampler(range(COUNT))
    if kind == "own weighted":
        return WeightedRandomSampler([1.0] * COUNT, COUNT, replacement=False)
    return None


def _read(rank: int, axis: str | None, ranks: int, kind: str, workers: int) -> Any:
    L.seed_everything(5, workers=True, verbose=False)
    flags: dict[str, Any] = {"max_epochs": 2}
    trainer = replicated(1, ranks, axis, **flags) if axis else zero(1, ranks, **flags)
    module = Reader()
    sampler = _sampler(kind)
    train = DataLoader(
        range(COUNT),
        batch_size=2,
        shuffle=kind == "shuffled",
        sampler=sampler,
        num_workers=workers,  # type: ignore[arg-type]
    )
    trainer.fit(module, train, DataLoader(range(COUNT), batch_size=2))  # type: ignore[arg-type]
    return module.epochs, module.validated


@pytest.mark.parametrize(("kind", "workers"), [("shuffled", 0), ("shuffled", 2), ("own order", 0), ("own weighted", 2)])
@pytest.mark.parametrize(("axis", "world"), [(None, 2), (None, 4), ("tp", 4), ("pp", 4)])
def test_76_replicas_read_the_same_samples_and_data_ranks_share_them_out(
    ranks: RankPool, axis: str | None, world: int, kind: str, workers: int
) -> None:
    found = ranks(world, _read, axis, world, kind, workers, **TRAINER)
    if axis == "tp":  # innermost: neighbours are replicas
        assert found[0::2] == found[1::2]
        found = found[0::2]
    elif axis == "pp":  # outermost
        assert found[:2] == found[2:]
        found = found[:2]
    for epoch in range(2):
        seen = [number for epochs, _ in found for number in epochs[epoch]]
        assert sorted(seen) == list(range(COUNT))
    if kind != "own order":
        assert found[0][0][0] != found[0][0][1]
    assert sorted(number for _, validated in found for number in validated[: COUNT // len(found)]) == list(range(COUNT))


class ByRank(L.LightningDataModule):
    """A mistake: data that depend on the global rank."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        assert self.trainer is not None
        return DataLoader([torch.tensor(float(self.trainer.global_rank))] * 8, batch_size=1)  # type: ignore[arg-type]


def _by_rank(rank: int) -> None:
    replicated(1, 4, "tp").fit(Reader(), ByRank())


def test_76_replicas_that_read_other_samples_are_told(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"Ranks \d, \d must hold the same batch"):
        ranks(4, _by_rank, **TRAINER)


class Stream(IterableDataset[Tensor]):
    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def __iter__(self) -> Iterator[Tensor]:
        count = self.counts[torch.distributed.get_rank()]
        return iter(torch.arange(float(count)))


def _small(rank: int, ranks: int, count: int, batch_size: int, drop_last: bool) -> int:
    trainer = zero(1, ranks)
    trainer.fit(TinyLM(), loader(count, batch_size, drop_last=drop_last))
    return trainer.global_step


@pytest.mark.parametrize(
    ("ranks_", "count", "batch_size", "drop_last", "says"),
    [
        (4, 3, 1, False, r"3 samples for 4 data ranks.*at most 3"),
        (3, 1, 1, False, r"1 samples for 3 data ranks"),
        (2, 6, 4, True, r"no batch.*at least 8 samples.*drop_last=False"),
    ],
)
def test_77_data_that_cannot_give_every_rank_a_batch_are_refused(
    ranks: RankPool, ranks_: int, count: int, batch_size: int, drop_last: bool, says: str
) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match="(?s)" + says):
        ranks(ranks_, _small, ranks_, count, batch_size, drop_last, **TRAINER)
    assert time.monotonic() - started < 30


def _evaluated(rank: int, ranks: int, count: int) -> Any:
    trainer = zero(1, ranks)
    return trainer.validate(TinyLM(), loader(count, 1), verbose=False)


def test_77_validation_data_smaller_than_the_ranks_are_refused(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="3 samples for 4 data ranks"):
        ranks(4, _evaluated, 4, 3, **TRAINER)


def _streamed(rank: int, counts: list[int], axis: str | None) -> tuple[int, list[list[int]]]:
    trainer = replicated(1, 4, axis) if axis else zero(1, len(counts))
    module = Reader()
    trainer.fit(module, DataLoader(Stream(counts), batch_size=1))
    return trainer.global_step, module.epochs


@pytest.mark.parametrize(
    ("counts", "axis", "steps"),
    [([10, 15], None, 10), ([5, 0], None, 0), ([4, 2, 3], None, 2), ([6, 6, 3, 3], "tp", 3), ([6, 3, 6, 3], "pp", 3)],
)
def test_77_streams_of_different_lengths_end_together(
    ranks: RankPool, counts: list[int], axis: str | None, steps: int
) -> None:
    results = ranks(len(counts), _streamed, counts, axis, **TRAINER)
    assert one_and_same([step for step, _ in results]) == steps
    assert all(len(epochs[0]) == steps for _, epochs in results if epochs)


class Prepared(L.LightningDataModule):
    """Notes each call in a file, and in an attribute that must not be relied on."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.attribute = "made in __init__"
        self.order: list[str] = []

    def prepare_data(self) -> None:
        time.sleep(0.3)
        self.attribute = "made in prepare_data"
        with (self.folder / "calls").open("a") as file:
            file.write("prepare_data\n")
        (self.folder / "ready").touch()

    def setup(self, stage: str) -> None:
        self.order.append(f"ready={(self.folder / 'ready').exists()}")

    def train_dataloader(self) -> DataLoader[Tensor]:
        return loader(8)


def _prepared(rank: int, ranks: int, folder: str) -> Any:
    data = Prepared(folder)
    zero(1, ranks).fit(TinyLM(), data)
    return data.order, data.attribute


@pytest.mark.parametrize("world", [2, 3])
def test_79_prepare_data_runs_once_per_node_and_before_any_setup(ranks: RankPool, tmp_path: Path, world: int) -> None:
    found = ranks(world, _prepared, world, str(tmp_path), **TRAINER)
    assert (tmp_path / "calls").read_text().splitlines() == ["prepare_data"]
    assert [order for order, _ in found] == [["ready=True"]] * world
    # What prepare_data leaves in attributes exists on the rank that ran it alone: `setup` is the place for state.
    assert [attribute for _, attribute in found] == ["made in prepare_data"] + ["made in __init__"] * (world - 1)


class Unprepared(Prepared):
    def prepare_data(self) -> None:
        raise OSError("the disk is full")


def _unprepared(rank: int, folder: str) -> None:
    zero(1, 3).fit(TinyLM(), Unprepared(folder))


def test_79_prepare_data_that_fails_on_rank_0_ends_the_others(ranks: RankPool, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match="the disk is full"):
        ranks(3, _unprepared, str(tmp_path), **TRAINER)
    assert time.monotonic() - started < 30

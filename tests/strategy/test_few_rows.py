"""Rows that data ranks cannot share out evenly: evaluated and predicted once each, or refused with the numbers."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from lightning_5d import ExpertParallel, FiveD, PipelineParallel, ZeRO
from lightning_5d.samplers import EvenBatches, RowsOnce, evaluated_rows
from tests.expert_parallel.in_stages import sparse
from tests.modules import TinyLM, Tokens, loader
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.trainers import plain, quiet, zero

TRAINER: dict[str, Any] = {"backend": None, "timeout": 50.0}
ONE: dict[str, Any] = {**TRAINER, "env": {"WORLD_SIZE": None}}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 9])
def test_ranks_have_all_rows_between_them_and_none_twice(rows: int, shuffle: bool) -> None:
    for ranks in (1, 2, 4):
        samplers = [RowsOnce(range(rows), ranks, rank, shuffle) for rank in range(ranks)]
        for sampler in samplers:
            sampler.set_epoch(3)
        dealt = [list(sampler) for sampler in samplers]
        assert [len(each) for each in dealt] == [len(sampler) for sampler in samplers]
        assert sorted(chain.from_iterable(dealt)) == list(range(rows))
        if not shuffle:
            assert dealt == [list(range(rank, rows, ranks)) for rank in range(ranks)]


@pytest.mark.parametrize("size", [2, 3])
def test_evaluation_has_equally_many_batches_on_all_ranks_and_one_of_them_at_most_is_not_full(size: int) -> None:
    for ranks in (1, 2, 4):
        for rows in range(ranks, 4 * ranks * size):
            assert evaluated_rows(rows, ranks, size, drop_last=False, even=True) == rows
            dealt = [EvenBatches(RowsOnce(range(rows), ranks, rank), size) for rank in range(ranks)]
            batches = [list(each) for each in dealt]
            assert {len(each) for each in batches} == {len(each) for each in dealt} == {-(-rows // (ranks * size))}
            assert all(len(batch) == size for each in batches for batch in each[:-2])
            assert all(1 <= len(batch) <= size for each in batches for batch in each)
            assert sorted(row for each in batches for batch in each for row in batch) == list(range(rows))


@pytest.mark.parametrize("limit", [1, 0.9])
def test_a_limit_gives_the_batches_that_one_process_has_below_it(limit: float) -> None:
    dealt = [next(iter(EvenBatches(RowsOnce(range(9), 2, rank), 4, limit=limit))) for rank in range(2)]
    assert sorted(dealt[0] + dealt[1]) == list(range(8))
    assert [len(EvenBatches(RowsOnce(range(9), 2, rank), 4, limit=limit)) for rank in range(2)] == [2, 2]


def test_evaluated_are_as_many_rows_as_one_process_evaluates_in_batches_of_all_ranks() -> None:
    kept = [evaluated_rows(rows, 2, 3, drop_last=False, even=False) for rows in (6, 7, 8, 11, 12)]
    assert kept == [6, None, 8, 11, 12]
    assert [evaluated_rows(rows, 2, 3, drop_last=True, even=True) for rows in (5, 6, 11, 12)] == [0, 6, 6, 12]
    assert evaluated_rows(5, 2, 1, drop_last=False, even=True) is None


class Written(BasePredictionWriter):
    """Keeps what a writer of predictions is given."""

    def __init__(self) -> None:
        super().__init__("epoch")
        self.rows: list[list[list[int]]] = []

    def write_on_epoch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, predictions: Any, batch_indices: Any
    ) -> None:
        self.rows = [[list(batch) for batch in of_loader] for of_loader in batch_indices]


class Predicting(TinyLM):
    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch).argmax(-1)


class Mixed(L.LightningModule):
    """A mixture of experts that predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.model = sparse()()

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.model(batch)[0].argmax(-1)


def _predict(rank: int, module: Callable[[], Any], plugins: tuple[Any, ...], ranks: int, counts: list[int]) -> Any:
    written = Written()
    trainer = quiet(strategy=FiveD(*plugins, timeout=40.0), devices=ranks, callbacks=[written])
    predicted = trainer.predict(module(), [loader(count, 2) for count in counts])
    assert predicted is not None
    of_loaders = predicted if len(counts) > 1 else [predicted]
    rows = [[row.tolist() for batch in batches for row in batch] for batches in of_loaders]  # type: ignore[union-attr]
    return trainer.strategy.distributed_sampler_kwargs["rank"], written.rows, rows  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("plugins", "ranks_", "counts", "module"),
    [
        ((ZeRO(stage=0),), 4, [1], Predicting),
        ((ZeRO(stage=3),), 4, [3], Predicting),
        ((ZeRO(stage=1),), 2, [1, 5, 0], Predicting),
        ((PipelineParallel(2), ZeRO(stage=1)), 4, [1], Predicting),
        ((ExpertParallel(2), ZeRO(stage=3)), 4, [2], Mixed),
    ],
)
def test_fewer_rows_than_data_ranks_are_predicted_once_each(
    ranks: RankPool, plugins: tuple[Any, ...], ranks_: int, counts: list[int], module: Callable[[], Any]
) -> None:
    alone = module()
    found = ranks(ranks_, _predict, module, plugins, ranks_, counts, **TRAINER)
    replicas = max(rank for rank, _, _ in found) + 1
    for data_rank, written, predicted in found:
        for index, count in enumerate(counts):
            mine = list(range(data_rank, count, replicas))
            assert list(chain.from_iterable(written[index])) == mine
            expected = [alone.predict_step(Tokens(count)[row][None], 0)[0].tolist() for row in mine]
            assert predicted[index] == expected


class Counting(TinyLM):
    """Logs how many rows it is given."""

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.log("rows", float(len(batch)), reduce_fx="sum", sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        super().test_step(batch, batch_idx)
        self.log("rows", float(len(batch)), reduce_fx="sum", sync_dist=True)


class InBatches(BatchSampler):
    """One of a user's own."""


def _evaluate(rank: int, stage: int | None, ranks: int) -> Any:
    def trainer(**arguments: Any) -> L.Trainer:
        return quiet(**arguments) if stage is None else zero(stage, ranks, **arguments)

    size = 4 // ranks
    own = DataLoader(Tokens(7), batch_sampler=InBatches(SequentialSampler(Tokens(7)), size, drop_last=False))
    found: list[Any] = [
        trainer().validate(Counting(), [loader(6, size), own, loader(0, size)], verbose=False),
        trainer().validate(Counting(), loader(7, size, drop_last=True), verbose=False),
        trainer().test(Counting(), loader(7, size, shuffle=True), verbose=False),
    ]
    fitting = trainer(max_epochs=2)
    fitting.fit(Counting(), loader(16, size), loader(5, size))
    found.append(plain(fitting.callback_metrics)["rows"])
    fitting = trainer()
    fitting.fit(Counting(), loader(0, size))
    return found, fitting.global_step


@pytest.mark.parametrize("stage", [0, 3])
def test_evaluation_counts_each_row_once(ranks: RankPool, stage: int) -> None:
    ((expected, steps),) = ranks(1, _evaluate, None, 1, **ONE)
    assert [expected[0][1]["rows/dataloader_idx_1"], expected[1][0]["rows"], expected[3]] == [7, 4, 5]
    assert steps == 0  # no data
    for found, steps in ranks(2, _evaluate, stage, 2, **TRAINER):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert steps == 0


class Stream(IterableDataset[Tensor]):
    """Rank r yields `counts[r]` rows."""

    def __init__(self, *counts: int) -> None:
        self.counts = counts

    @property
    def count(self) -> int:
        return self.counts[torch.distributed.get_rank()]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(Tokens(32).rows[: self.count])


class Sized(Stream):
    def __len__(self) -> int:
        return self.count


class Boastful:
    """A loader that has a batch fewer than it says, on rank 0 of a length that no other rank has."""

    def __len__(self) -> int:
        return 3 + torch.distributed.get_rank()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(Tokens(2 * len(self) - 2).rows.split(2))


def _train(rank: int, make: Callable[[], Any], ranks: int, flags: dict[str, Any]) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = zero(1, ranks, **flags)
        trainer.fit(Counting(), make(), make())
    said = [str(warning.message) for warning in caught]
    return trainer.global_step, float(trainer.callback_metrics["rows"]), said


def _stream(kind: type[Stream], *counts: int) -> DataLoader[Tensor]:
    return DataLoader(kind(*counts), batch_size=2)


@pytest.mark.parametrize(
    ("make", "flags", "steps", "rows"),
    [
        (partial(_stream, Stream, 4, 8), {}, 2, 8),  # rank 0 does not see that others have more
        (partial(_stream, Sized, 4, 8), {}, 2, 8),
        (partial(_stream, Sized, 12, 8), {"limit_train_batches": 0.5, "limit_val_batches": 0.25}, 2, 4),
    ],
)
def test_streams_that_end_at_different_times_are_told_of(
    ranks: RankPool, make: Callable[[], Any], flags: dict[str, Any], steps: int, rows: int
) -> None:
    found = ranks(2, _train, make, 2, flags, **TRAINER)
    assert [each[:2] for each in found] == [(steps, rows)] * 2
    if not flags:
        assert any("Data ranks have different numbers of batches" in said for said in found[0][2])


def test_rows_that_must_count_twice_are_told_of_with_what_would_help(ranks: RankPool) -> None:
    found = ranks(2, _train, partial(loader, 5, 1), 2, {}, **TRAINER)
    assert [rows for _, rows, _ in found] == [6, 6]
    says = "5 rows in batches of 1 on each of 2 data ranks leave 1 for the last batch, so 1 of the first rows"
    (said,) = (said for said in found[0][2] if says in said)
    assert "if there are 4 or 6 rows" in said


class Listed:
    """A batch sampler that takes no sampler."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3], [4]])

    def __len__(self) -> int:
        return 3


def _listed(rank: int) -> None:
    zero(0, 2).predict(TinyLM(), DataLoader(Tokens(5), batch_sampler=Listed()))  # type: ignore[arg-type]


def _own_batches() -> DataLoader[Tensor]:
    return DataLoader(Tokens(1), batch_sampler=InBatches(SequentialSampler(Tokens(1)), 2, drop_last=False))


def test_batches_that_cannot_be_dealt_out_are_refused(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="Listed cannot be given a sampler, so each of 2 data ranks would predict all"):
        ranks(2, _listed, **TRAINER)
    with pytest.raises(RankError, match="1 samples for 2 data ranks"):
        ranks(2, _train, _own_batches, 2, {}, **TRAINER)
    with pytest.raises(RankError, match=r"no batch on some ranks \(batches by data rank: \[2, 0\]"):
        ranks(2, _train, partial(_stream, Sized, 4, 0), 2, {}, **TRAINER)
    with pytest.raises(RankError, match=r"\(Boastful\) said that it has \d batches, and ended after 2"):
        ranks(2, _train, Boastful, 2, {}, **TRAINER)


def _limited(rank: int) -> list[list[int]]:
    trainer = zero(1, 2, limit_predict_batches=0.5)
    module = TinyLM()
    found = [trainer.predict(module, loader(13, 2))]
    trainer.validate(module, loader(5, 2), verbose=False)
    found.append(trainer.predict(module, trainer.val_dataloaders))
    return [[len(batch) for batch in predicted or []] for predicted in found]  # type: ignore[arg-type]


def test_a_share_of_the_batches_is_the_same_on_all_ranks_in_prediction(ranks: RankPool) -> None:
    # One process would predict 2 of 4 batches of 4, and 1 of 2, of a loader that evaluation has had before.
    assert ranks(2, _limited, **TRAINER) == [[[2, 2], [2]], [[2, 2], [1]]]


def _streamed(rank: int, kind: type[Stream]) -> list[int]:
    predicted = zero(3, 2).predict(TinyLM(), _stream(kind, 3, 0))
    return [len(batch) for batch in predicted or []]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Stream, Sized])
def test_a_rank_whose_stream_is_empty_predicts_nothing(ranks: RankPool, kind: type[Stream]) -> None:
    assert ranks(2, _streamed, kind, **TRAINER) == [[2, 1], []]

"""Which data rank evaluates and predicts which rows: each row once, whatever the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.distributed import _DatasetSamplerWrapper
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler
from typing_extensions import override

if TYPE_CHECKING:
    import lightning.pytorch as pl


class RowsOnce(DistributedSampler[Any]):
    """Deals the rows of a sampler out to data ranks: rank r of R has every R-th one from its r-th on, and none is repeated.

    Args:
        sampler: Indices of rows, in order.
        num_replicas: The number of data ranks, R.
        rank: This data rank.
        shuffle: Whether to shuffle, by the epoch.
        rows: How many of the rows to deal out; all of them if ``None``. A rank may have none.
    """

    def __init__(
        self,
        sampler: Sampler[Any] | Iterable[Any],
        num_replicas: int,
        rank: int,
        shuffle: bool = False,
        rows: int | None = None,
    ) -> None:
        self._indices = _DatasetSamplerWrapper(sampler)
        super().__init__(self._indices, num_replicas, rank, shuffle)
        self._inner = sampler
        self.total_size = len(self._indices) if rows is None else rows
        self.num_samples = len(range(rank, self.total_size, num_replicas))

    @override
    def __iter__(self) -> Iterator[Any]:
        self._indices.reset()
        count = len(self._indices)
        places: Sequence[int] = range(count)
        if self.shuffle:
            places = torch.randperm(count, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        return (self._indices[place] for place in places[self.rank : self.total_size : self.num_replicas])

    @override
    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if callable(tell := getattr(self._inner, "set_epoch", None)):
            tell(epoch)


class EvenBatches(BatchSampler):
    """Equally many batches on every data rank, all of one size but the last: a rank that would have one less makes two of its last.

    Args:
        sampler: This rank's rows.
        batch_size: At least 2, unless all ranks have as many batches anyway.
        drop_last: Not looked at: nothing is left out. Lightning gives it to batch samplers that it makes again.
        limit: The most batches that will be asked for, or their share. Where that leaves the last ones out, no batch is made two.
    """

    def __init__(self, sampler: RowsOnce, batch_size: int, drop_last: bool = False, limit: float = 1.0) -> None:
        super().__init__(sampler, batch_size, drop_last=False)
        self._most = math.ceil(math.ceil(sampler.total_size / sampler.num_replicas) / batch_size)
        self._all = limit >= (self._most if isinstance(limit, int) else 1.0)

    def __len__(self) -> int:
        return self._most

    @override
    def __iter__(self) -> Iterator[list[Any]]:
        full = super().__len__()
        for index, batch in enumerate(super().__iter__(), start=1):
            if index == full < self._most and self._all:
                yield batch[:-1]
                batch = batch[-1:]
            yield batch


def evaluated_rows(rows: int, ranks: int, batch_size: int, *, drop_last: bool, even: bool) -> int | None:
    """How many rows data ranks evaluate in equally many batches with none of them twice, as many as one process does.

    Args:
        rows: All there are.
        ranks: Data ranks.
        batch_size: Of each rank.
        drop_last: Whether batches that are not full are left out.
        even: Whether `EvenBatches` makes the batches.

    Returns:
        The number; ``None`` if some rank would have a batch less than others, as there are no more rows for it.
    """
    last = rows % (ranks * batch_size)
    if drop_last:
        return rows - last
    return rows if last == 0 or last >= ranks or (even and batch_size > 1 and rows >= ranks) else None


class DealingConnector(_DataConnector):
    """Lightning's data connector, which repeats no row in evaluation, and lets ranks be without one in prediction.

    Where there is one data rank, training data keep the order of the user's loader.

    Args:
        before: The connector in whose place this one is.
    """

    # Written against lightning 2.6.6.

    def __init__(self, before: _DataConnector) -> None:
        super().__init__(before.trainer)
        self.__dict__.update(vars(before))

    @override
    def _prepare_dataloader(self, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        loader = super()._prepare_dataloader(dataloader, shuffle, mode)
        batches = getattr(loader, "batch_sampler", None)
        noting = batches if isinstance(batches, _IndexBatchSamplerWrapper) else None  # which rows are predicted
        if noting is not None:
            batches = noting._batch_sampler
        if type(batches) is not BatchSampler or not isinstance(batches.sampler, RowsOnce) or batches.drop_last:
            return loader
        sampler, size = batches.sampler, batches.batch_size
        if evaluated_rows(sampler.total_size, sampler.num_replicas, size, drop_last=False, even=True) is None:
            return loader
        even = EvenBatches(sampler, size, limit=getattr(self.trainer, f"limit_{mode.dataloader_prefix}_batches"))
        if noting is not None:
            noting._batch_sampler = even
        else:
            # Past `DataLoader.__setattr__`, which wants a new loader for it. This one was just made.
            vars(loader)["batch_sampler"] = even
        return loader

    @override
    def _resolve_sampler(
        self, dataloader: DataLoader[Any], shuffle: bool, mode: RunningStage | None = None
    ) -> Sampler[Any] | Iterable[Any]:
        place = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1}
        if (
            mode == RunningStage.TRAINING
            and place["num_replicas"] == 1
            and type(dataloader.sampler) is SequentialSampler
        ):
            return dataloader.sampler  # Lightning would shuffle what one process does not
        if (
            mode == RunningStage.TRAINING
            or place["num_replicas"] == 1
            or not self._requires_distributed_sampler(dataloader)
        ):
            return super()._resolve_sampler(dataloader, shuffle, mode)
        if mode == RunningStage.PREDICTING:
            _check_can_be_dealt_out(dataloader.batch_sampler, place["num_replicas"])
            return RowsOnce(dataloader.sampler, **place, shuffle=shuffle)
        sampler = dataloader.sampler
        if isinstance(sampler, (RandomSampler, SequentialSampler)):
            sampler = SequentialSampler(dataloader.dataset)  # type: ignore[arg-type]
        batches = dataloader.batch_sampler
        size = 1 if batches is None else getattr(batches, "batch_size", None)
        if not isinstance(sampler, Sized) or not isinstance(size, int):
            return super()._resolve_sampler(dataloader, shuffle, mode)
        ranks, drop_last = place["num_replicas"], bool(getattr(batches, "drop_last", False))
        rows = evaluated_rows(len(sampler), ranks, size, drop_last=drop_last, even=type(batches) is BatchSampler)
        if rows is None:
            _warn_of_repeated(len(sampler), ranks, size)
            return super()._resolve_sampler(dataloader, shuffle, mode)
        again = shuffle and not self.trainer.overfit_batches  # type: ignore[attr-defined]
        return RowsOnce(sampler, **place, shuffle=again, rows=rows)


def deal_rows_once(trainer: pl.Trainer) -> None:
    """Has the data ranks of `trainer` evaluate and predict each row once, where Lightning puts a sampler in."""
    if not isinstance(trainer._data_connector, DealingConnector):
        trainer._data_connector = DealingConnector(trainer._data_connector)


def _check_can_be_dealt_out(batches: Any, ranks: int) -> None:
    if batches is None or hasattr(batches, "__pl_saved_args"):
        return
    if not (hasattr(batches, "batch_size") and hasattr(batches, "drop_last")):
        raise MisconfigurationException(
            f"The batch sampler {type(batches).__qualname__} cannot be given a sampler, so each of {ranks} data ranks would predict"
            " all of its batches. Let it take `sampler`, `batch_size` and `drop_last` as torch's BatchSampler does, or set"
            " Trainer(use_distributed_sampler=False) and have it give each data rank batches of its own, by"
            " `trainer.strategy.distributed_sampler_kwargs`."
        )


def _warn_of_repeated(rows: int, ranks: int, batch_size: int) -> None:
    if rows < ranks:  # refused anyway
        return
    last = rows % ranks
    rank_zero_warn(
        f"{rows} rows in batches of {batch_size} on each of {ranks} data ranks leave {last} for the last batch, so {ranks - last} of"
        f" the first rows will count twice in this evaluation. Each counts once in batches of 2 or more that torch's BatchSampler"
        f" makes, or if there are {rows - last} or {rows + ranks - last} rows."
    )

"""Logged values are the same on every rank, whoever logs them; with all ranks logging alike they are those of one process."""

import time
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torchmetrics import MaxMetric, MeanMetric

from lightning_5d.logs import LogExchange
from lightning_5d.logs.recording import merge, recording, replay
from lightning_5d.logs.values import LoggedValues
from tests.modules import TinyLM, loader
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.strategy.test_trainer import Data, assert_close
from tests.trainers import plain, quiet, zero
from tests.traps.replicas import one_and_same, replicated

TRAINER = {"backend": None, "timeout": 40.0}


class Alike(TinyLM):
    """Logs in every way that has the same result for one batch and for its halves."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        values = batch.float()
        both = {"on_step": True, "on_epoch": True, "sync_dist": True}
        self.log("mean", values.mean(), prog_bar=True, **both)
        for name in ("sum", "max", "min"):
            self.log(name, getattr(values, name)(), reduce_fx=name, **both)
        chosen = values[values > 3]
        self.log("weighted", chosen.mean(), on_step=False, on_epoch=True, sync_dist=True, batch_size=len(chosen))
        if batch_idx >= 2:
            self.log("late", values.mean() + 1, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.log("hook", batch.float().mean(), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log("epoch", float(self.current_epoch), sync_dist=True)

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val_step", batch.float().mean(), on_step=True, on_epoch=True, sync_dist=True)
        self.log(f"one_{dataloader_idx}", batch.float().mean(), sync_dist=True, add_dataloader_idx=False)
        self.mean.update(batch.float().mean())

    def on_validation_epoch_end(self) -> None:
        self.log("val_mean", self.mean)
        self.log("val_hook", float(self.trainer.global_step), sync_dist=True)


class TwoLoaders(Data):
    def val_dataloader(self) -> Any:
        return [self._loader(self.val, 2), self._loader(2 * self.val, 3)]


def _alike(rank: int, stage: int | None, folder: str) -> Any:
    callback = ModelCheckpoint(folder, monitor="epoch", mode="max", filename="{epoch:.0f}-{mean_epoch:.4f}")
    arguments: dict[str, Any] = {
        "callbacks": [callback],
        "enable_checkpointing": True,
        "logger": CSVLogger(folder, name="csv", version=0),
        "log_every_n_steps": 1,
        "max_epochs": 2,
    }
    trainer = quiet(**arguments) if stage is None else zero(stage, 2, **arguments)
    trainer.fit(Alike(), TwoLoaders())
    return plain(trainer.callback_metrics), plain(trainer.progress_bar_metrics), Path(callback.best_model_path).name


def _rows(folder: Path) -> list[list[float]]:
    names, *rows = [line.split(",") for line in (folder / "csv/version_0/metrics.csv").read_text().splitlines()]
    order = sorted(range(len(names)), key=lambda column: names[column])
    return [[float(row[column]) if row[column] else -1.0 for column in order] for row in rows]


@pytest.mark.parametrize("stage", [0, 3])
def test_values_that_all_ranks_log_equal_one_process(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    one = ranks(1, _alike, None, str(tmp_path / "one"), **TRAINER, env={"WORLD_SIZE": None})[0]
    metrics, bar, best = one_and_same(ranks(2, _alike, stage, str(tmp_path / "two"), **TRAINER))
    assert {"mean_step", "sum_epoch", "hook", "late", "val_mean", "val_step_epoch/dataloader_idx_1"} <= set(metrics)
    assert_close((metrics, bar), one[:2])
    assert best == one[2]
    rows = [_rows(tmp_path / name) for name in ("one", "two")]
    assert len(rows[0]) > 8
    for first, second in zip(*rows, strict=True):
        assert second == pytest.approx(first, rel=1e-5)


class Some(TinyLM):
    """Only the last rank logs, in the ways that would have others wait."""

    def __init__(self) -> None:
        super().__init__()
        self.highest = MaxMetric()
        self.lrs: list[float] = []

    @property
    def last(self) -> bool:
        return self.global_rank == self.trainer.world_size - 1

    def on_train_epoch_start(self) -> None:
        self.lrs.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.highest.update(self.global_rank + 1.0)
        if self.last:
            self.log("highest", self.highest, on_step=False, on_epoch=True)
            self.log("most", 1.0 * batch_idx, reduce_fx="max", on_step=False, on_epoch=True, sync_dist=True)
            if batch_idx >= 2:
                self.log("late", 7.0 + batch_idx, on_step=True, on_epoch=True, sync_dist=True)
        if self.global_rank == 0:
            self.log("alone", 3.0, sync_dist=True, rank_zero_only=True)
            self.trainer.callback_metrics  # noqa: B018 - rank 0's progress bar reads alone, too
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if self.last:
            self.log("hook", 1.0 * batch_idx, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        if self.last:
            self.log("epoch_end", 5.0 + self.current_epoch, sync_dist=True)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.last:
            self.log("val_loss", 2.0 + batch_idx, on_step=True, on_epoch=True, sync_dist=True, batch_size=1 + batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss_epoch"}}


def _some(rank: int, world: int, axis: str | None, folder: str) -> Any:
    callback = ModelCheckpoint(folder, monitor="epoch_end", filename="{epoch}-{epoch_end:.0f}-{highest:.0f}")
    arguments: dict[str, Any] = {"callbacks": [callback], "enable_checkpointing": True, "max_epochs": 3}
    trainer = replicated(1, world, axis, **arguments) if axis else zero(3, world, **arguments)
    module = Some()
    trainer.fit(module, loader(8 * world), loader(4 * world))
    metrics = plain(trainer.callback_metrics)
    alone = metrics.pop("alone", None)
    return alone, (metrics, module.lrs, Path(callback.best_model_path).name)


@pytest.mark.parametrize(("world", "axis"), [(2, None), (4, "pp")])
def test_values_that_one_rank_logs_are_everyones(ranks: RankPool, tmp_path: Path, world: int, axis: str | None) -> None:
    results = ranks(world, _some, world, axis, str(tmp_path), **TRAINER)
    assert [alone for alone, _ in results] == [3.0, *[None] * (world - 1)]
    metrics, lrs, best = one_and_same([result for _, result in results])
    batches = 8 if axis else 4
    assert metrics["highest"] == world
    assert metrics["most"] == metrics["hook"] == batches - 1
    assert metrics["late_step"] == 7 + batches - 1
    assert metrics["late_epoch"] == 7 + (2 + batches - 1) / 2
    assert metrics["epoch_end"] == 7.0
    # 2 and 3 (and 4 and 5) with weights 1 and 2 (and 3 and 4).
    assert metrics["val_loss_epoch"] == pytest.approx(40 / 10 if axis else 8 / 3)
    assert lrs == pytest.approx([0.1, 0.1, 0.05])
    assert best == f"epoch=0-epoch_end=5-highest={world}.ckpt"


class Grouped(TinyLM):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_rank != 3:
            pair = self.trainer.pair  # type: ignore[attr-defined]
            value = torch.tensor(1.0 + self.global_rank)
            self.log("pair", value, on_step=True, on_epoch=True, sync_dist=True, sync_dist_group=pair)
            if self.global_rank < 2:
                self.log("first", value, sync_dist=True, sync_dist_group=pair)
        self.log("everyone", 1.0 * self.global_rank, sync_dist=True, prog_bar=self.global_rank == 0)
        return self.loss(batch)


def _grouped(rank: int) -> dict[str, float]:
    trainer = zero(0, 4)

    def make_groups(*_: Any) -> None:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        trainer.pair = groups[rank // 2]  # type: ignore[attr-defined]

    module = Grouped()
    module.on_fit_start = make_groups  # type: ignore[method-assign]
    trainer.fit(module, loader(16))
    return plain(trainer.callback_metrics)


def test_a_group_of_ones_own_is_the_mean_over_it(ranks: RankPool) -> None:
    found = ranks(4, _grouped, **TRAINER)
    assert [rank["pair_step"] for rank in found] == [1.5, 1.5, 3.0, 3.0]
    assert [rank["pair_epoch"] for rank in found] == [1.5, 1.5, 3.0, 3.0]
    assert [rank["everyone"] for rank in found] == [1.5] * 4
    assert [rank.get("first") for rank in found] == [1.5, 1.5, None, None]


class Unlike(TinyLM):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("a", 1.0, on_step=True, on_epoch=self.global_rank == 1, sync_dist=True)
        return self.loss(batch)


def _unlike(rank: int) -> None:
    zero(0, 2).fit(Unlike(), loader(8))


def test_different_arguments_for_one_key_are_an_error_that_names_it(ranks: RankPool) -> None:
    with pytest.raises(
        RankError, match=r"'training_step.a' is logged with different arguments: on_epoch=False by rank 0"
    ):
        ranks(2, _unlike, **TRAINER)


class Many(TinyLM):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for number in range(100):
            self.log(f"key_{number}", 1.0 * number, sync_dist=True)
        return self.loss(batch)


def _counted(rank: int, many: bool) -> tuple[int, int, dict[str, float]]:
    counts = {"messages": 0, "all_reduce": 0}

    def counting(name: str, function: Any) -> Any:
        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return counted

    originals = LogExchange._send, dist.all_reduce
    LogExchange._send = counting("messages", LogExchange._send)  # type: ignore[method-assign]
    dist.all_reduce = counting("all_reduce", dist.all_reduce)
    try:
        found = []
        for steps in (10, 30):
            counts.update(messages=0, all_reduce=0)
            trainer = zero(0, 2, max_steps=steps)
            trainer.fit(Many() if many else TinyLM(), loader(4 * 30))
            found.append(dict(counts))
    finally:
        LogExchange._send, dist.all_reduce = originals  # type: ignore[method-assign]
    messages, reductions = (found[1][name] - found[0][name] for name in counts)
    return messages, reductions, plain(trainer.callback_metrics)


def test_a_step_has_two_small_messages_however_many_keys_there_are(ranks: RankPool) -> None:
    messages, reductions, _ = one_and_same(ranks(2, _counted, False, **TRAINER))
    assert messages == 20 * 2
    assert reductions == 0, "ranks of one host need no collective"
    messages, reductions, metrics = one_and_same(ranks(2, _counted, True, **TRAINER))
    assert messages == 20 * 2
    assert reductions == 20 * 2, "a message has no room for 100 keys: two sums take the rest"
    assert [metrics[f"key_{number}"] for number in range(100)] == [float(number) for number in range(100)]


class Stops(TinyLM):
    """Rank 1 alone decides to stop."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def _reach(self, where: str) -> None:
        if where == self.where and self.global_rank == 1 and self.trainer.global_step >= 5:
            self.trainer.should_stop = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._reach("training_step")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self._reach("on_train_batch_end")

    def on_validation_end(self) -> None:
        self._reach("on_validation_end")

    def on_train_epoch_end(self) -> None:
        self._reach("on_train_epoch_end")


def _stops(rank: int, stage: int, where: str) -> tuple[int, float]:
    trainer = zero(stage, 2, max_epochs=4, val_check_interval=2)
    started = time.monotonic()
    trainer.fit(Stops(where), loader(32), loader(4))
    return trainer.global_step, time.monotonic() - started


@pytest.mark.parametrize(
    ("where", "stage", "steps"),
    [("training_step", 0, 7), ("on_train_batch_end", 3, 6), ("on_validation_end", 0, 6), ("on_train_epoch_end", 1, 8)],
)
def test_a_rank_that_stops_alone_stops_all_at_the_same_step(
    ranks: RankPool, stage: int, where: str, steps: int
) -> None:
    found = ranks(2, _stops, stage, where, **TRAINER)
    assert found[0][0] == found[1][0]
    assert found[0][0] in (steps, steps - 1)
    assert max(seconds for _, seconds in found) < 30


class Leaves(TinyLM):
    """Rank 1 leaves its epoch before the third batch."""

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
        return -1 if self.global_rank == 1 and batch_idx == 2 else None


def _leaves(rank: int) -> None:
    zero(0, 2).fit(Leaves(), loader(32))


def test_a_rank_that_leaves_its_loop_is_told_where_the_others_are(ranks: RankPool) -> None:
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(2, _leaves, **TRAINER)
    assert "rank 1 of 2 is at the end of an epoch (train, batch 3 of epoch 0)" in str(caught.value)
    assert "of the others 1 at a training step" in str(caught.value)
    assert time.monotonic() - started < 30


def _logged(parts: list[tuple[Tensor, int]], in_parts: bool) -> dict[str, float]:
    values = LoggedValues(training=True)

    def step(batch: Tensor, size: int) -> None:
        both = {"on_step": True, "on_epoch": True}
        values.log("training_step", "mean", batch.mean(), batch_size=size, **both)
        for name in ("sum", "max", "min"):
            values.log("training_step", name, getattr(batch, name)(), reduce_fx=name, **both)

    for _ in range(2):
        if in_parts:
            recorded = []
            for part, size in parts:
                with recording(values) as calls:
                    step(part, size)
                recorded.append(calls)
            replay(values, merge(recorded, [size for _, size in parts]))
        else:
            step(torch.cat([part for part, _ in parts]), sum(size for _, size in parts))
    return plain({**values.metrics(on_step=True)["log"], **values.metrics(on_step=False)["log"]})


def test_a_step_recorded_in_parts_logs_what_the_whole_batch_does() -> None:
    parts = [(torch.tensor([1.0, 5.0, 3.0]), 3), (torch.tensor([8.0]), 1)]
    whole_batch = _logged(parts, in_parts=False)
    assert whole_batch["mean_step"] == 17 / 4
    assert whole_batch["sum_epoch"] == 34
    assert _logged(parts, in_parts=True) == pytest.approx(whole_batch)

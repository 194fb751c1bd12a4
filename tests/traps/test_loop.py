"""Section K: logging, callbacks and steps that ranks do not agree on never leave anybody waiting."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.modules import TinyLM, loader
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.trainers import plain, whole, zero
from tests.traps.replicas import STAGES, TRAINER, one_and_same, replicated


class Disagreeing(TinyLM):
    """Logs on one rank only, or in another order on each."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        rank = self.global_rank
        values = {"a": torch.tensor(1.0 + rank), "b": torch.tensor(10.0 + rank)}
        if self.how == "other order":
            values = dict(reversed(values.items())) if rank else values
            self.log_dict(values, on_step=True, on_epoch=True, sync_dist=True)
        elif self.how == "last rank only" and rank == self.trainer.world_size - 1:
            self.log("a", values["a"], on_step=True, on_epoch=True, sync_dist=True)
        elif self.how == "one more" and rank == 0:
            self.log_dict(values, on_step=True, on_epoch=True, sync_dist=True)
        elif self.how == "one more":
            self.log("b", values["b"], on_step=True, on_epoch=True, sync_dist=True)
        return self.loss(batch)


def _disagreeing(rank: int, stage: int, ranks: int, how: str) -> tuple[dict[str, float], float]:
    trainer = zero(stage, ranks)
    started = time.monotonic()
    trainer.fit(Disagreeing(how), loader(4 * ranks))
    return plain(trainer.callback_metrics), time.monotonic() - started


@pytest.mark.parametrize(
    ("how", "world", "stage"),
    [("other order", 2, 0), ("other order", 3, 3), ("last rank only", 2, 1), ("one more", 2, 3)],
)
def test_58_keys_logged_by_some_ranks_or_in_another_order_are_the_mean_over_those_that_logged(
    ranks: RankPool, how: str, world: int, stage: int
) -> None:
    results = ranks(world, _disagreeing, stage, world, how, **TRAINER)
    metrics = one_and_same([result[0] for result in results])
    mean = (world - 1) / 2
    right = {
        "other order": {"a": 1.0 + mean, "b": 10.0 + mean},
        "last rank only": {"a": float(world)},
        "one more": {"a": 1.0, "b": 10.0 + mean},
    }[how]
    for name, value in right.items():
        assert metrics[f"{name}_step"] == pytest.approx(value)
        assert metrics[f"{name}_epoch"] == pytest.approx(value)
    assert all(result[1] < 30 for result in results)


class Monitored(TinyLM):
    """Its validation loss is the number of the data rank, plus one."""

    def __init__(self) -> None:
        super().__init__()
        self.lrs: list[float] = []

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        place = self.trainer.strategy.distributed_sampler_kwargs["rank"]  # type: ignore[attr-defined]
        self.log("val_loss", torch.tensor(1.0 + place), sync_dist=True)
        self.log("val_sum", torch.tensor(1.0 + place), sync_dist=True, reduce_fx="sum", on_epoch=True)

    def on_train_epoch_start(self) -> None:
        self.lrs.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def _monitored(rank: int, stage: int, axis: str, folder: str) -> Any:
    callback = ModelCheckpoint(folder, monitor="val_loss", filename="{epoch}-{val_loss:.2f}")
    trainer = replicated(stage, 4, axis, callbacks=[callback], enable_checkpointing=True, max_epochs=3)
    module = Monitored()
    trainer.fit(module, loader(8), loader(4))
    trainer.strategy.barrier()
    metrics = {k: v for k, v in plain(trainer.callback_metrics).items() if k.startswith("val")}
    return metrics, module.lrs, callback.best_model_path, Path(callback.best_model_path).is_file()


@pytest.mark.parametrize("axis", ["tp", "pp"])
@pytest.mark.parametrize("stage", [0, 2])
def test_59_a_metric_is_the_mean_over_data_ranks_only_and_callbacks_see_it_on_every_rank(
    ranks: RankPool, tmp_path: Path, stage: int, axis: str
) -> None:
    metrics, lrs, best, there = one_and_same(ranks(4, _monitored, stage, axis, str(tmp_path), **TRAINER))
    # One batch of validation per data rank.
    assert metrics == {"val_loss": 1.5, "val_sum": 3.0}
    assert lrs == pytest.approx([0.1, 0.1, 0.05])
    assert Path(best).name == "epoch=0-val_loss=1.50.ckpt"
    assert there


class Late(ModelCheckpoint):
    """Rank 1 comes to each save later than rank 0 has written its file."""

    def _save_topk_checkpoint(self, trainer: Any, monitor_candidates: Any) -> None:
        if trainer.global_rank == 1:
            time.sleep(0.2)
        super()._save_topk_checkpoint(trainer, monitor_candidates)


def _late(rank: int, stage: int, folder: str) -> Any:
    callback = Late(folder, monitor="val_loss", save_top_k=2, filename="same-name", save_last=True)
    trainer = zero(stage, 2, callbacks=[callback], enable_checkpointing=True, max_epochs=3)
    module = TinyLM()
    trainer.fit(module, loader(8), loader(4))
    trained = whole(module)["head.weight"].tolist()
    (tested,) = trainer.test(module, loader(4), ckpt_path="best", verbose=False)
    state = {k: str(v) for k, v in sorted(callback.best_k_models.items())}
    kept = sorted(path.name for path in Path(folder).iterdir())
    return callback.best_model_path, callback.last_model_path, state, kept, tested, trained


@pytest.mark.parametrize("stage", STAGES)
def test_61_a_rank_that_comes_late_takes_the_same_file_names(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    best, last, models, kept, tested, _ = one_and_same(ranks(2, _late, stage, str(tmp_path), **TRAINER))
    assert Path(best).name in kept
    assert Path(last).name in kept
    assert len(models) == 2
    assert {Path(path).name for path in models} | {Path(last).name} == set(kept)
    assert tested["test_loss"] > 0


class Silent(TinyLM):
    """Rank 1 has nothing to return at its third batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx == 2 and self.global_rank == 1:
            return None if self.how == "none" else torch.zeros(())
        return self.loss(batch)


def _silent(rank: int, stage: int, ranks: int, how: str, accumulate: int) -> None:
    zero(stage, ranks, accumulate_grad_batches=accumulate).fit(Silent(how), loader(10 * ranks))


@pytest.mark.parametrize(
    ("how", "says", "stage", "accumulate"),
    [
        ("none", "training_step returned None on rank 1 of 2", 0, 1),
        ("none", "training_step returned None on rank 1 of 2", 1, 2),
        ("none", "training_step returned None on rank 1 of 2", 3, 1),
        ("constant", "does not require grad", 0, 2),
        ("constant", "does not require grad", 2, 1),
    ],
)
def test_62_a_step_without_a_loss_on_one_rank_is_an_error_of_the_whole_job(
    ranks: RankPool, stage: int, how: str, says: str, accumulate: int
) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=says) as caught:
        ranks(2, _silent, stage, 2, how, accumulate, **TRAINER)
    assert caught.value.rank == 1
    assert "time limit" not in str(caught.value)
    assert time.monotonic() - started < 30

"""Whole runs of a Trainer, and everything that a user can see of them, for one process and for stages."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_5d import FiveD, PipelineParallel, ZeRO
from tests.modules import VOCABULARY, TinyLM, Tokens
from tests.trainers import plain, quiet


class Model(TinyLM):
    """Logs in every hook that it can, counts with torchmetrics, and returns more than a loss."""

    def __init__(self, plateau: bool = False, step_wise: bool = False, tied: bool = False) -> None:
        super().__init__(layers=4, tied=tied)
        self.plateau, self.step_wise = plateau, step_wise
        self.accuracy = MulticlassAccuracy(VOCABULARY, average="micro")
        self.scores = MetricCollection({"f1": MulticlassF1Score(VOCABULARY), "acc": MulticlassAccuracy(VOCABULARY)})
        self.mean = MeanMetric()
        self.seen: list[Any] = []

    def _step(self, batch: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        logits = self(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        alike: dict[str, Any] = {"sync_dist": True, "add_dataloader_idx": kind == "test"}
        self.log(f"{kind}_loss", loss, prog_bar=True, on_step=kind == "train", on_epoch=True, **alike)
        self.log(f"{kind}_top", logits.max(), reduce_fx="max", **alike)
        return loss, logits

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss, logits = self._step(batch, "train")
        self.accuracy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_accuracy", self.accuracy, on_step=True, on_epoch=True)
        return {"loss": loss, "first": logits[:, 0, 0], "rows": len(batch), "batch_idx": batch_idx}

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss, logits = self._step(batch, "val" if dataloader_idx == 0 else "more")
        self.scores.update(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.mean.update(loss, weight=len(batch))
        return loss

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"loss": self._step(batch, "test")[0], "index": batch_idx}

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"logits": self(batch)[:, -1], "first": batch[:, 0], "loader": dataloader_idx}

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.log("end", outputs["loss"], sync_dist=True)
        self._see("train", outputs["loss"].item(), outputs["first"].tolist(), outputs["rows"], outputs["batch_idx"])

    def on_validation_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._see("val", outputs.item(), batch_idx, dataloader_idx)

    def on_test_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._see("test", outputs["loss"].item(), outputs["index"], batch_idx, dataloader_idx)

    def on_predict_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._see("predict", outputs["logits"].tolist(), outputs["loader"], batch_idx, dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        self.log_dict({f"val_{name}": value for name, value in self.scores.compute().items()})
        self.log("val_mean", self.mean.compute())
        self.scores.reset()
        self.mean.reset()

    def on_train_epoch_end(self) -> None:
        self._see("epoch", plain(self.trainer.callback_metrics))

    def _see(self, *what: Any) -> None:
        self.seen.append(what)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        if self.plateau:
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.05)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        interval = "step" if self.step_wise else "epoch"
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": interval}}


class Bar(TQDMProgressBar):
    """Keeps what the bar shows."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self.shown.append({k: float(str(v)) for k, v in self.get_metrics(trainer, pl_module).items() if k != "v_num"})
        super().on_train_batch_end(trainer, pl_module, *args)


class Writer(BasePredictionWriter):
    """Keeps what it is given to write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []
        self.epoch: Any = None

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *where: Any) -> None:
        self.batches.append((prediction["logits"].tolist(), indices, where[1:]))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Sequence[Any], indices: Any) -> None:
        self.epoch = [[part["logits"].tolist() for part in loader] for loader in predictions], indices


def part(rows: int, size: int, seed: int, data_rank: int, data_ranks: int) -> DataLoader[Tensor]:
    """This data rank's share of each of the batches of `size` that one process reads."""
    own = [
        share
        for batch in torch.split(torch.arange(rows), size)
        for share in batch.chunk(data_ranks)[data_rank].tolist()
    ]
    return DataLoader(Tokens(rows, seed=seed), size // data_ranks, sampler=own)


def trainer_of(ranks: int, data_ranks: int = 1, stage: int = 1, schedule: str = "1f1b", **arguments: Any) -> L.Trainer:
    """A Trainer for one process or, inside a rank of a pool, for stages."""
    if ranks == 1:
        return quiet(devices=1, use_distributed_sampler=False, **arguments)
    strategy = FiveD(ZeRO(stage=stage), PipelineParallel(ranks // data_ranks, schedule=schedule, microbatches=3))
    return quiet(strategy=strategy, devices=ranks, use_distributed_sampler=False, **arguments)


def everything(rank: int, ranks: int, folder: str, data_ranks: int = 1, schedule: str = "1f1b") -> dict[str, Any]:
    """A whole run in one process, or on stages."""
    make = partial(trainer_of, ranks, data_ranks, schedule=schedule)
    return whole_run(Model(plateau=True), make, folder, rank % data_ranks, data_ranks)


def whole_run(
    module: Model, trainer_of: Callable[..., L.Trainer], folder: str, data_rank: int, data_ranks: int
) -> dict[str, Any]:
    """Fits with every kind of callback, then validates, tests and predicts."""
    place = data_rank, data_ranks
    bar, writer = Bar(), Writer()
    best = ModelCheckpoint(dirpath=f"{folder}/best", monitor="val_loss", save_top_k=2)
    stop = EarlyStopping("val_loss", patience=1, min_delta=0.02)
    rates = LearningRateMonitor(logging_interval="step")
    trainer = trainer_of(
        callbacks=[bar, best, stop, rates, writer],
        logger=CSVLogger(folder, "csv", ""),
        enable_checkpointing=True,
        enable_progress_bar=True,
        num_sanity_val_steps=1,
        log_every_n_steps=1,
        max_epochs=8,
        default_root_dir=folder,
    )
    # The last batches are smaller, and smaller than there are microbatches.
    val = [part(10, 8, 1, *place), part(8, 8, 3, *place)]
    trainer.fit(module, part(18, 8, 1, *place), val)
    found: dict[str, Any] = {
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "stopped": stop.stopped_epoch,
        "best": Path(best.best_model_path).name,
        "kept": sorted((Path(path).name, float(score)) for path, score in best.best_k_models.items()),
        "files": sorted(path.name for path in Path(folder, "best").iterdir()),
        "bar": bar.shown,
        "fit": plain(trainer.callback_metrics),
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "sanity": module.seen[0],
    }
    found["validate"] = trainer.validate(module, val)
    found["test"] = trainer.test(module, val, ckpt_path="best")
    found["predict"] = [
        [{**batch, "logits": batch["logits"].tolist(), "first": batch["first"].tolist()} for batch in loader]
        for loader in trainer.predict(module, val, return_predictions=True) or []
    ]
    found["written"] = writer.batches, writer.epoch
    found["seen"] = module.seen
    return found

"""A plugin in which only the last stage comes to the end of a step, as in a pipeline, and a module that logs and counts there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MaxMetric, MeanMetric, Metric, MetricCollection, MinMetric, SumMetric
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
)
from torchmetrics.regression import PearsonCorrCoef
from typing_extensions import override

from lightning_5d import FiveD, Parallelism, ZeRO
from lightning_5d.mesh import ParallelMesh
from lightning_5d.parallelism import Dtypes, Parallelized, Size
from lightning_5d.pipeline_parallel.microbatches import split_batch
from lightning_5d.pipeline_parallel.sharing import SharedSteps
from lightning_5d.plan import ParallelPlan
from tests.modules import TinyLM
from tests.trainers import quiet


class Boundary(Exception):
    """Where a stage that is not the last ends its part of a step."""


@dataclass(frozen=True)
class LastStages(Parallelism):
    """Runs each step in microbatches to its end on the `sources`, and up to the network on all ranks of ``pp``."""

    axis: ClassVar[str] = "pipeline"
    order: ClassVar[int] = 10
    size: int = 2
    microbatches: int = 3
    sources: tuple[int, ...] = (1,)

    def mesh_sizes(self) -> dict[str, Size]:
        return {"pp": self.size}

    def parallelize(self, module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, dtypes: Dtypes) -> Parallelized:
        return _AtWork(self, module, mesh)


class _AtWork(Parallelized):
    def __init__(self, plugin: LastStages, module: Any, mesh: ParallelMesh) -> None:
        self.plugin, self.module, self.rank = plugin, module, mesh.rank("pp")
        self.shared = SharedSteps(module, mesh, torch.device("cpu"))
        self.stop = False
        module.net.register_forward_pre_hook(self._boundary)

    def _boundary(self, *_: Any) -> None:
        if self.stop:
            raise Boundary

    @contextmanager
    def _stage(self, last: bool) -> Iterator[None]:
        self.stop = not last
        try:
            yield
        except Boundary:
            pass
        finally:
            self.stop = False

    @override
    def call(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        training = self.module.trainer.training
        parts = split_batch(args[0], self.plugin.microbatches)
        rows, outputs = [part.rows for part in parts], {}
        sources = self.plugin.sources
        for index, part in enumerate(parts):
            # Every rank has an early stage; a microbatch ends on one of the sources.
            for last in (False, sources[index % len(sources)] == self.rank):
                with self._stage(last), self.shared.microbatch(index, rows, last=last):
                    outputs[index] = step(part.batch, *args[1:], **kwargs)
        merged = self.shared.finish(outputs, rows, sources, training=training)
        output = merged.output
        if not training:
            return output
        nothing = sum(0.0 * parameter.sum() for parameter in self.module.parameters())
        return output + nothing if isinstance(output, Tensor) else {**output, "loss": output["loss"] + nothing}


def staged(ranks: int = 2, size: int = 2, sources: tuple[int, ...] = (1,), **arguments: Any) -> L.Trainer:
    """A quiet Trainer whose steps end on the last stages only."""
    plugin = LastStages(size, sources=sources)
    return quiet(strategy=FiveD(ZeRO(stage=0), plugin), devices=ranks, **arguments)


class Drift(Metric):
    """A metric whose state has no reduction that could add it up."""

    full_state_update = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("newest", torch.zeros(()), dist_reduce_fx=None)

    def update(self, value: Tensor) -> None:
        self.newest = value.max()

    def compute(self) -> Tensor:
        return self.newest.max()


def _per_row(batch: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    return logits[:, -1], batch[:, -1]


class Metered(L.LightningModule):
    """Logs and counts in its steps in all the ways there are; weights never change."""

    def __init__(self, one_source: bool = True) -> None:
        super().__init__()
        self.net = TinyLM(layers=1)
        self.net.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
        for name in ("train", "val"):
            setattr(self, f"{name}_acc", MulticlassAccuracy(13, average="macro"))
            setattr(self, f"{name}_f1", MulticlassF1Score(13))
            setattr(self, f"{name}_mean", MeanMetric())
            setattr(self, f"{name}_sum", SumMetric())
            setattr(self, f"{name}_max", MaxMetric())
            setattr(self, f"{name}_min", MinMetric())
            setattr(self, f"{name}_auroc", BinaryAUROC())
            setattr(self, f"{name}_matrix", MulticlassConfusionMatrix(13))
            setattr(self, f"{name}_early", SumMetric())
            group = {"precision": MulticlassPrecision(13), "recall": MulticlassAccuracy(13)}
            setattr(self, f"{name}_group", MetricCollection(group, prefix=f"{name}_"))
            if one_source:
                setattr(self, f"{name}_pearson", PearsonCorrCoef())
        self.one_source = one_source
        self.seen: list[dict[str, float]] = []
        self.outputs: list[Any] = []

    def _shared_step(self, batch: Tensor, batch_idx: int, kind: str, loader: int = 0) -> dict[str, Any]:
        metric = lambda name: getattr(self, f"{kind}_{name}")  # noqa: E731
        self.log(f"{kind}_dropped", 1.0)
        metric("early").update(batch.float().sum())
        logits = self.net(batch)
        self.trainer.strategy  # noqa: B018
        scores, target = _per_row(batch, logits)
        loss = F.cross_entropy(scores, target)
        both = {"on_step": True, "on_epoch": True}
        self.log(f"{kind}_loss", loss, prog_bar=True, sync_dist=True, **both)
        self.log(f"{kind}_local", loss, on_step=False, on_epoch=True)
        for reduce in ("sum", "max", "min"):
            self.log(f"{kind}_{reduce}d", getattr(scores, reduce)(), reduce_fx=reduce, sync_dist=True, **both)
        chosen = scores[:, 0] > scores[:, 0].mean() - 100
        self.log_dict({f"{kind}_sized": scores[chosen].mean(), f"{kind}_step": loss * 2}, batch_size=int(chosen.sum()))
        self.log(f"{kind}_constant_{loader}", 3.0 + batch_idx, batch_size=1, add_dataloader_idx=False, sync_dist=True)
        if batch_idx % 2:
            self.log(f"{kind}_odd", loss + 1, sync_dist=True)
        metric("acc")(scores, target)
        self.log(f"{kind}_acc", metric("acc"), **both)
        metric("f1").update(scores, target)
        self.log(f"{kind}_f1", metric("f1"), on_step=False, on_epoch=True)
        metric("mean").update(loss)
        metric("sum").update(target.float())
        metric("max")(scores.max())
        metric("min").update(scores.min())
        metric("auroc")(scores.softmax(-1)[:, 0], (target > 5).long())
        self.log(f"{kind}_auroc", metric("auroc"), **both)
        metric("matrix").update(scores, target)
        metric("group").update(scores, target)
        if self.one_source:
            metric("pearson")(scores[:, 0], target.float())
            self.log(f"{kind}_pearson", metric("pearson"), **both)
        return {"loss": loss, "scores": scores.detach(), "names": [str(row) for row in target.tolist()]}

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self._shared_step(batch, batch_idx, "train")

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self._shared_step(batch, batch_idx, "val", dataloader_idx)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"scores": self.net(batch)[:, -1], "names": [f"row {i}" for i in batch[:, 0].tolist()]}

    def _read(self, kind: str) -> None:
        found = {name: value.tolist() for name, value in self.trainer.callback_metrics.items()}
        names = ["acc", "f1", "mean", "sum", "max", "min", "auroc", "matrix", "early"]
        for name in names + ["pearson"] * self.one_source:
            found[f"{name} of {kind}"] = getattr(self, f"{kind}_{name}").compute().tolist()
        found |= {name: value.tolist() for name, value in getattr(self, f"{kind}_group").compute().items()}
        self.seen.append(found)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.outputs.append([float(outputs["loss"]), outputs["scores"].tolist(), outputs["names"]])
        self._read("train")

    def on_validation_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.outputs.append([float(outputs["loss"]), outputs["scores"].tolist(), outputs["names"]])

    def on_validation_epoch_end(self) -> None:
        self._read("val")
        for name in ("mean", "sum", "max", "min", "matrix", "early", "group"):
            getattr(self, f"val_{name}").reset()

    def on_train_epoch_end(self) -> None:
        self._read("train")
        for name in ("mean", "sum", "max", "min", "matrix", "early", "group"):
            getattr(self, f"train_{name}").reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Weighted(L.LightningModule):
    """Its loss is a mean over tokens that are not 0, of which some rows have none."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.net, self.wrong = nn.Linear(1, 1), wrong
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.net(batch[..., None].float())[..., 0][batch != 0].mean()
        if self.wrong == "group":
            self.log("loss", loss, sync_dist=True, sync_dist_group=torch.distributed.group.WORLD)
        elif self.wrong == "raises":
            raise RuntimeError("on the last stage")
        else:
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        extra = {"group": lambda: None} if self.wrong == "pickle" else {}
        if self.wrong == "odd":
            extra = {"shape": torch.zeros(2, int(batch[0, 0]) + 1)}
        return {"loss": loss, "weight": int((batch != 0).sum()), **extra}

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.seen.append([float(outputs["loss"]), outputs["weight"], self.trainer.callback_metrics["loss"].item()])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

"""Validation, test and prediction with cut sequences: metrics and outputs are those of one process, on every rank."""

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix
from torchmetrics.text import Perplexity

from lightning_5d import ContextParallel, FiveD
from lightning_5d.context_parallel.shown import SequenceShard
from lightning_5d.models import DecoderConfig, LanguageModel
from tests.context_parallel.test_training import METHODS, Uneven
from tests.pipeline_parallel.test_sharing import close
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, SIZES, VOCABULARY
from tests.trainers import plain, quiet


class Measured(LanguageModel):
    """Counts tokens with torchmetrics in every kind of step, and logs with and without the sum over ranks."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(DecoderConfig(**SIZES))
        self.accuracy = MulticlassAccuracy(VOCABULARY, average="micro", ignore_index=-100)
        self.confusion = MulticlassConfusionMatrix(VOCABULARY, ignore_index=-100)
        self.perplexity = Perplexity(ignore_index=-100)
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch["input_ids"])
        self.accuracy(logits.transpose(1, 2), batch["labels"])
        self.log("train_accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("length", float(logits.shape[1]))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        logits, labels = self(batch["input_ids"]), batch["labels"]
        counts = labels != -100
        self.perplexity.update(logits, labels)
        self.confusion.update(logits.flatten(0, 1), labels.flatten())
        self.mean.update((logits.argmax(-1) == labels)[counts].float())
        self.log("perplexity", self.perplexity)
        self.log("largest", logits.amax(), reduce_fx="max")
        self.log("share", ((logits.argmax(-1) == labels) & counts).sum() / counts.sum(), sync_dist=True)
        return {"first": logits[:, 0], "last": logits[:, -1], "guesses": logits.argmax(-1)}

    def on_validation_epoch_end(self) -> None:
        self.log("right", self.mean.compute())
        self.log("confused", (self.confusion.compute() * torch.arange(VOCABULARY)).float().sum())
        self.mean.reset()
        self.confusion.reset()

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        logits = self(batch["input_ids"])
        return {"logits": logits, "nested": [(logits.softmax(-1).amax(-1), batch["labels"])], "rows": len(logits)}

    test_step = validation_step


class Outputs(L.Callback):
    """Keeps what hooks are given."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.found.append(_listed(outputs))

    on_test_batch_end = on_validation_batch_end


def _listed(outputs: dict[str, Tensor]) -> dict[str, Any]:
    assert {type(each) for each in outputs.values()} == {Tensor}, "outputs are whole"
    return {name: each.tolist() for name, each in outputs.items()}


def _loaders() -> list[DataLoader[Any]]:
    """Of other lengths, the last batches smaller than the others."""
    return [DataLoader(Uneven(rows, tokens), batch_size=4) for rows, tokens in ((10, 16), (6, 13), (3, 9))]


def _evaluated(rank: int, plugin: ContextParallel | None) -> dict[str, Any]:
    chosen: dict[str, Any] = {"devices": 1} if plugin is None else {"strategy": FiveD(plugin), "devices": plugin.size}
    seen, module = Outputs(), Measured()
    trainer = quiet(callbacks=[seen], use_distributed_sampler=False, num_sanity_val_steps=1, **chosen)
    trainer.fit(module, _loaders()[0], _loaders())
    found: dict[str, Any] = {"fit": plain(trainer.callback_metrics), "steps": trainer.global_step}
    found["validate"] = trainer.validate(module, _loaders(), verbose=False)
    found["test"] = trainer.test(module, _loaders(), verbose=False)
    predicted: Any = trainer.predict(module, _loaders())
    found["predict"] = [
        [(each["logits"].tolist(), each["nested"][0][0].tolist(), each["rows"]) for each in loader]
        for loader in predicted
    ]
    found["outputs"] = seen.found
    return found


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    """What one process finds."""
    return _evaluated(0, None)


@pytest.mark.parametrize(("method", "size"), [("ring zigzag", 4), ("ulysses", 2)])
def test_metrics_and_outputs_are_those_of_one_process(
    ranks: RankPool, one: dict[str, Any], method: str, size: int
) -> None:
    for found in ranks(size, partial(_evaluated, plugin=ContextParallel(size, **METHODS[method])), **SEPARATE):
        close(found, one)


def _in_parts(rank: int) -> list[Any]:
    plugin = ContextParallel(2, whole_outputs=False)
    trainer = quiet(strategy=FiveD(plugin), devices=2, use_distributed_sampler=False)
    predicted: Any = trainer.predict(Measured(), _loaders())
    found = []
    for loader in predicted:
        for each in loader:
            logits = each["logits"]
            assert isinstance(logits, SequenceShard)
            assert type(each["nested"][0][1]) is Tensor
            cut = plugin.cut(logits.shape[1])
            assert logits.local.shape[1] == cut.held(rank) < logits.shape[1]
            found.append(logits.whole().tolist())
    return found


def test_outputs_stay_in_parts_where_asked(ranks: RankPool) -> None:
    expected: Any = quiet(devices=1).predict(Measured(), _loaders())
    for found in ranks(2, _in_parts, **SEPARATE):
        close(found, [each["logits"].tolist() for loader in expected for each in loader])

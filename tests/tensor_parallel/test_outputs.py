"""What people get to see: whole logits from steps, and a description of the run."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_5d import FiveD, PipelineParallel, TensorParallel, ZeRO
from lightning_5d.models import DecoderConfig, LanguageModel
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, SIZES, VOCABULARY, Dealt, Rows
from tests.trainers import quiet


@dataclass
class Seen:
    best: Tensor
    logits: Tensor


class Returning(LanguageModel):
    """Returns logits in all the ways that people do."""

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Any:
        logits = self(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        return {"loss": loss, "logits": logits, "nested": [{"scaled": 2 * logits}, "text"]}

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        logits = self(batch["input_ids"])
        return CausalLMOutput(loss=logits.logsumexp(-1).mean(), logits=logits)

    def test_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Any:
        logits = self(batch["input_ids"])
        return Seen(logits.argmax(-1), logits[:, -1])

    def predict_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Any:
        return self(batch["input_ids"])


class Outputs(L.Callback):
    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.found.setdefault("train", outputs)

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.found.setdefault("validate", outputs)

    def on_test_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.found.setdefault("test", outputs)


class Loaders(Dealt):
    test_dataloader = predict_dataloader = Dealt.train_dataloader


def _outputs(rank: int, plugins: Any, world: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module, outputs = Returning(DecoderConfig(**SIZES), {"lr": 3e-3, "warmup_steps": 2}), Outputs()
    chosen: dict[str, Any] = {"strategy": FiveD(*plugins)} if plugins else {}
    trainer = quiet(devices=world, callbacks=[outputs], use_distributed_sampler=False, max_steps=1, **chosen)
    data = Loaders(Rows(8, 6), 4)
    trainer.fit(module, data)
    trainer.validate(module, data)
    trainer.test(module, data)
    found: dict[str, Any] = dict(outputs.found)
    predicted = trainer.predict(module, data)
    train, validate, test = found["train"], found["validate"], found["test"]
    kind = type(validate).__name__
    tensors = {
        "train": train["logits"],
        "train nested": train["nested"][0]["scaled"],
        "validate": validate.logits,
        "validate by key": validate["logits"],
        "test": test.logits,
        "test best": test.best,
        **{f"predict {index}": each for index, each in enumerate(predicted or ())},
    }
    assert train["nested"][1] == "text"
    assert {type(tensor) for tensor in tensors.values()} == {Tensor}
    return {"kind": kind, "tensors": {name: tensor.detach().clone() for name, tensor in tensors.items()}}


@pytest.mark.parametrize(
    "plugins",
    [(TensorParallel(2, sequence_parallel=True),), (PipelineParallel(2, microbatches=2), TensorParallel(2))],
    ids=["tp+sp", "pp+tp"],
)
def test_what_steps_return_is_whole_and_plain_on_every_rank(ranks: RankPool, plugins: Any) -> None:
    world = 2 * len(plugins)
    found = ranks(world, partial(_outputs, plugins=plugins, world=world), **SEPARATE)
    expected = _outputs(0, (), 1)
    for each in found:
        assert each["kind"] == "CausalLMOutput"
        assert set(each["tensors"]) == set(expected["tensors"])
        for name, tensor in each["tensors"].items():
            torch.testing.assert_close(tensor, expected["tensors"][name], rtol=1e-4, atol=1e-5, msg=name)
    assert expected["tensors"]["predict 0"].shape == (4, 6, VOCABULARY)


def _described(rank: int) -> tuple[str, str, list[str]]:
    strategy = FiveD(TensorParallel(2, sequence_parallel=True), ZeRO(stage=1))
    before = strategy.describe()
    said: list[str] = []
    logger, listener = logging.getLogger("lightning.pytorch.utilities.rank_zero"), logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(listener)
    torch.manual_seed(0)
    module = LanguageModel(DecoderConfig(**SIZES), {"lr": 3e-3, "warmup_steps": 2})
    trainer = quiet(devices=2, strategy=strategy, use_distributed_sampler=False, max_steps=1)
    try:
        trainer.fit(module, Dealt(Rows(8, 6), 4))
    finally:
        logger.removeHandler(listener)
    return before, strategy.describe(), said


def test_a_strategy_describes_its_mesh_its_plugins_and_what_became_of_each_layer(ranks: RankPool) -> None:
    (_, _, said), (before, after, silent) = ranks(2, _described, **SEPARATE)
    line = "FiveD(TensorParallel(size=2, sequence_parallel=True), ZeRO(stage=1)): dp_shard=1 x tp=2 (2 ranks)"
    assert said.count(line) == 1, said
    assert line not in silent
    assert before.splitlines() == [
        "Mesh: none yet, processes have not started",
        "",
        "tensor: TensorParallel(size=2, sequence_parallel=True), not at work yet",
        "",
        "data: ZeRO(stage=1), not at work yet",
    ]
    lines = after.splitlines()
    assert lines[0] == "Mesh: dp_shard=1 x tp=2 (2 ranks)"
    assert "tensor: TensorParallel(size=2, sequence_parallel=True)" in lines
    assert any("q_proj" in line and "weight 8x16" in line for line in lines), after
    assert "Tensor axis of 2: " in after
    assert lines[-1] == "data: ZeRO(stage=1)"

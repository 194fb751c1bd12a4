"""Layers behind doors that run again in backward: attention finds the door that was open, whoever asks for the second run."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers")

from lightning_5d import ContextParallel, FiveD, PipelineParallel, ZeRO
from lightning_5d.callbacks import Throughput
from lightning_5d.models import DecoderConfig, LanguageModel
from tests.context_parallel.test_hugging_face import sentences
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, SIZES, Dealt, Rows, compare, decoder
from tests.tensor_parallel.test_hugging_face import Labelled
from tests.trainers import quiet

EXACT: dict[str, Any] = {"precision": "64-true", "tolerance": 1e-6}  # Hugging Face's norms and losses are in fp32


@pytest.mark.parametrize(
    ("kind", "data", "mode"),
    [("Llama", "right", "full"), ("Llama", "left", 0.5), ("Mistral", "right", "selective")],
)
def test_masks_are_those_of_the_first_run(ranks: RankPool, kind: str, data: str, mode: Any) -> None:
    strategy = {"activation_checkpointing": mode}
    module = partial(Labelled, kind)
    compare(ranks, module, ContextParallel(2), world=2, data=partial(sentences, data), strategy=strategy, **EXACT)


class Recomputing(Labelled):
    """Hugging Face's own gradient checkpointing."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__("Llama")
        (model,) = self.children()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})


@pytest.mark.parametrize(("reentrant", "stages"), [(True, 1), (False, 1), (False, 2)])
def test_recomputation_of_the_models_own(ranks: RankPool, reentrant: bool, stages: int) -> None:
    pipeline = [PipelineParallel(2, microbatches=2)] if stages > 1 else []
    data, module = partial(sentences, "plain"), partial(Recomputing, reentrant)
    compare(ranks, module, *pipeline, ContextParallel(2), world=2 * stages, data=data, **EXACT)


class Around(LanguageModel):
    """Its step itself has the whole model run again: the door is inside of what does."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        logits: Tensor = checkpoint(self.decoder, input_ids, position_ids, use_reentrant=False)
        return logits


def _around() -> Around:
    torch.manual_seed(0)
    return Around(DecoderConfig(**SIZES), {"lr": 3e-3, "warmup_steps": 2})


def test_doors_open_again_in_what_the_step_has_run_again(ranks: RankPool) -> None:
    compare(ranks, _around, ContextParallel(2), world=2, tokens=7, precision="64-true", tolerance=1e-10)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_operations_count_as_in_one_process(ranks: RankPool, method: Any) -> None:
    found = ranks(4, _count, (ContextParallel(2, method=method), ZeRO(stage=1)), **SEPARATE)
    assert all(totals == _count(0, None) for totals in found)


def _count(rank: int, plugins: Any) -> dict[str, float]:
    chosen: Any = {"devices": 1} if plugins is None else {"strategy": FiveD(*plugins), "devices": 4}
    throughput = Throughput()
    trainer = quiet(callbacks=[throughput], use_distributed_sampler=False, **chosen)
    trainer.fit(decoder()(), datamodule=Dealt(Rows(8, 16), 4))
    return throughput.totals

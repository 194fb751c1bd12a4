"""Hugging Face models as they come, with their own loss, train on parts of sequences as in one process."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

pytest.importorskip("transformers")

from lightning_5d import ContextParallel, FiveD, TensorParallel
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, Dealt, apart, fit
from tests.tensor_parallel.test_hugging_face import Labelled

VOCABULARY = 61
ARGUMENTS: Mapping[str, Any] = {"gradient_clip_val": 0.5, "limit_val_batches": 2}


class Sentences(Dataset[dict[str, Tensor]]):
    """Rows padded on one side, or of several documents, or plain ones."""

    def __init__(self, kind: str, count: int = 12, tokens: int = 12) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(3, VOCABULARY, (count, tokens), generator=generator)
        self.kind, self.tokens = kind, tokens

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, places = self.ids[index], torch.arange(self.tokens)
        length = 4 + 5 * index % (self.tokens - 4)
        if self.kind == "plain":
            return {"input_ids": ids, "labels": ids}
        if self.kind == "packed":
            return {
                "input_ids": ids,
                "labels": ids,
                "position_ids": torch.where(places < length, places, places - length),
            }
        mask = places < length if self.kind == "right" else places >= self.tokens - length
        return {"input_ids": ids * mask, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def sentences(kind: str, **options: Any) -> Dealt:
    return Dealt(Sentences(kind, **options), 4)


def _fit_each(rank: int, runs: list[tuple[Any, str]], strategy: Any, **arguments: Any) -> list[Any]:
    """Several runs in one call of the pool: most of a short run's time is its start."""
    return [fit(rank, module, partial(sentences, kind), strategy, **arguments) for module, kind in runs]


RUNS: dict[str, tuple[Any, str]] = {
    "Llama, packed": (partial(Labelled, "Llama"), "packed"),
    "Llama, left": (partial(Labelled, "Llama"), "left"),
    "Qwen3": (partial(Labelled, "Qwen3"), "plain"),
    "Mistral, window, right": (partial(Labelled, "Mistral", sliding_window=3), "right"),
    "Mistral, window, packed": (partial(Labelled, "Mistral", sliding_window=5), "packed"),
    "Mixtral": (partial(Labelled, "Mixtral"), "plain"),
    "Gemma3": (partial(Labelled, "Gemma3", sliding_window=4), "plain"),
    "Phi3": (partial(Labelled, "Phi3"), "right"),
    "GPTNeoX": (partial(Labelled, "GPTNeoX"), "plain"),
    "Olmo2": (partial(Labelled, "Olmo2"), "plain"),
    "Cohere": (partial(Labelled, "Cohere"), "right"),
}
# How tokens get to other ranks depends on who may see whom, on heads with ulysses, and else on nothing that models differ in.
SEEING = [name for name, (_, kind) in RUNS.items() if kind != "plain" or name == "Gemma3"]
ONCE = [name for name in RUNS if name not in ("Llama, packed", "Mistral, window, right")]
PLUGINS: dict[str, tuple[tuple[Any, ...], list[str]]] = {
    "ring": ((ContextParallel(2),), [*RUNS]),
    "ulysses": ((ContextParallel(2, method="ulysses"),), [*RUNS]),
    "all_gather": ((ContextParallel(2, method="all_gather"),), SEEING),
    "ring on four": ((ContextParallel(4),), SEEING),
    "ring with cut layers": ((ContextParallel(2), TensorParallel(2, sequence_parallel=True)), ONCE),
}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return dict(zip(RUNS, _fit_each(0, list(RUNS.values()), None, **ARGUMENTS), strict=True))


@pytest.mark.parametrize("plugins", PLUGINS)
def test_models_train_and_validate_as_in_one_process(ranks: RankPool, alone: dict[str, Any], plugins: str) -> None:
    chosen, names = PLUGINS[plugins]
    world = 4 if len(chosen) > 1 or chosen[0].size == 4 else 2
    runs = [RUNS[name] for name in names]
    call = partial(_fit_each, runs=runs, strategy=partial(FiveD, *chosen), devices=world, **ARGUMENTS)
    found = ranks(world, call, **{**SEPARATE, "timeout": 180.0})
    for index, name in enumerate(names):
        differences = apart([each[index] for each in found], alone[name], 1e-6)
        assert max(differences.values()) < 1e-5, (name, differences)
        for metric in ("loss", "accuracy"):
            values = [each[index]["metrics"][metric] for each in found]
            assert values == pytest.approx([alone[name]["metrics"][metric]] * world, rel=1e-5), (name, metric)


class Masked(L.LightningModule):
    """BERT with its own loss of masked tokens."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForMaskedLM

        torch.manual_seed(0)
        sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48}
        config = BertConfig(
            **sizes,
            num_hidden_layers=2,
            num_attention_heads=4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.2,
        )
        self.model = BertForMaskedLM(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)

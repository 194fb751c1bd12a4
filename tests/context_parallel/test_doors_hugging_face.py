"""Hugging Face's models as they come: labels, positions and documents mean in doors what they mean in one process."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from tests.context_parallel.inside_doors import compare, doors_of, tokens
from tests.ranks import RankPool

SIZES = {
    "vocab_size": 13,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}


class Wrapped(L.LightningModule):
    def __init__(self, model: Any, **call: Any) -> None:
        super().__init__()
        self.model, self.call = model, call

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**batch, **self.call).loss
        return loss


def _step(module: Any, batch: Any) -> Tensor:
    loss: Tensor = module.loss(batch)
    return loss


def _batch(length: int) -> dict[str, Tensor]:
    ids = tokens(2, length)
    labels = ids.clone()
    labels[0, length // 2 :] = -100
    return {"input_ids": ids, "labels": labels}


def _model(name: str, **options: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=13, n_embd=16, n_layer=2, n_head=2, n_positions=16)
        model = transformers.GPT2LMHeadModel(config)
    elif name == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **options))
    elif name == "mixtral":
        config = transformers.MixtralConfig(**SIZES, num_local_experts=4, **options)
        model = transformers.MixtralForCausalLM(config)
    elif name == "roberta":
        config = transformers.RobertaConfig(**{**SIZES, "max_position_embeddings": 18}, pad_token_id=1)
        model = transformers.RobertaForMaskedLM(config)
    else:
        model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))
    return model.eval()  # no dropout


def _own_loss(logits: Tensor, labels: Tensor, **more: Any) -> Tensor:
    picked = logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None].clamp(min=0)).squeeze(-1)
    return -(picked * (labels[:, 1:] != -100)).sum() / labels.shape[1]


def _causal(rank: int) -> None:
    for name in ("llama", "gpt2"):
        model = _model(name)
        for length in (8, 7):
            compare(Wrapped(copy.deepcopy(model)), _step, _batch(length))
        # Sums over all tokens of a window, as trainers divide them.
        compare(Wrapped(copy.deepcopy(model), num_items_in_batch=11), _step, _batch(8))
    assert "_loss_function" not in vars(model)
    model.loss_function = _own_loss
    module = Wrapped(model)
    compare(module, _step, _batch(7))
    assert module.model.loss_function is _own_loss


def test_causal_models_shift_labels_over_cuts_and_get_global_positions(ranks: RankPool) -> None:
    ranks(2, _causal, backend="gloo", timeout=60)


def _bert(rank: int) -> None:
    for name in ("bert", "roberta"):
        batch = _batch(8)
        batch["input_ids"][1, :3] = 1  # RoBERTa's padding: its positions do not count it
        compare(Wrapped(_model(name)), _step, batch)
    compare(Wrapped(_model("bert")), _step, _batch(7))


def test_losses_inside_of_models_are_of_the_whole_sequence(ranks: RankPool) -> None:
    ranks(2, _bert, backend="gloo", timeout=60)


class _Logits(Wrapped):
    """Takes what the model returns, and computes its own loss."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        out = self.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
        hidden, head = self.model.model, self.model.lm_head
        again = head(hidden(batch["input_ids"], position_ids=batch["position_ids"]).last_hidden_state)
        assert out.logits.shape == again.shape == (2, 8, 13)
        return out.logits.square().mean() + again[:, :-1].mean()


def _documents(rank: int) -> None:
    packed = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 1]])
    model, batch = _model("llama", use_cache=False), {"input_ids": tokens(2, 8), "position_ids": packed}
    compare_to = copy.deepcopy(model)
    expected = compare_to(**batch).logits
    module = _Logits(model)
    doors = doors_of(module)
    with doors.step((batch, 0), {}):
        shown = model(**batch).logits
        # Inside of models, too: any module with weights is a door where the step calls it.
        again = model.lm_head(model.model(**batch).last_hidden_state)
    doors.close()
    for logits in (shown, again):
        torch.testing.assert_close(logits + 0 * torch.zeros(()), expected, rtol=1e-4, atol=1e-5)
    # With a cache, which is the default, Hugging Face does not look for documents.
    kept = _model("llama")
    expected = copy.deepcopy(kept)(**batch).logits
    doors = doors_of(_Logits(kept))
    with doors.step((batch, 0), {}):
        torch.testing.assert_close(kept(**batch).logits + 0 * torch.zeros(()), expected, rtol=1e-4, atol=1e-5)
    doors.close()


def test_positions_that_restart_are_documents_where_they_are_in_one_process(ranks: RankPool) -> None:
    ranks(2, _documents, backend="gloo", timeout=60)


def _refused(rank: int) -> list[str]:
    messages = []
    calls: list[tuple[Any, dict[str, Any]]] = [
        (_model("mixtral"), {"output_router_logits": True}),
        (_model("llama"), {"logits_to_keep": 1}),
        (_model("llama"), {"use_cache": True}),
    ]
    compare(Wrapped(_model("mixtral")), _step, _batch(8))
    for model, call in calls:
        module = Wrapped(model, **call)
        doors = doors_of(module)
        with pytest.raises(MisconfigurationException) as caught, doors.step((_batch(8), 0), {}):
            module.loss(_batch(8)).backward()
        messages.append(str(caught.value))
        doors.close()
        # What goes on from cached keys is whole, in steps too.
        expected = model.generate(tokens(2, 8), max_new_tokens=2, do_sample=False, pad_token_id=0)
        doors = doors_of(module)
        with doors.step((_batch(8), 0), {}):
            generated = model.generate(tokens(2, 8), max_new_tokens=2, do_sample=False, pad_token_id=0)
        doors.close()
        assert torch.equal(generated, expected)
    return messages


def test_what_each_rank_would_make_of_its_tokens_alone_is_refused(ranks: RankPool) -> None:
    for router, keep, cache in ranks(2, _refused, backend="gloo", timeout=60):
        assert "loss of model (MixtralForCausalLM)" in router
        assert "output_router_logits=False" in router
        assert "logits_to_keep=1" in keep
        assert "4 of 8 tokens" in keep
        assert "use_cache=True" in cache

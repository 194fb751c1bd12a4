"""Losses, metrics and Trainers as they are written for whole logits."""

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Accuracy
from torchmetrics.text import Perplexity

from lightning_5d.tensor_parallel.axis import CollectiveAxis
from lightning_5d.tensor_parallel.vocabulary import VocabularyShard
from tests.ranks import RankPool
from tests.tensor_parallel.vocabulary.parity import axis, columns, compare, logits

V = 61
IDS = torch.randint(V, (2, 9), generator=torch.Generator().manual_seed(0))
LABELS = IDS.masked_fill(torch.rand(IDS.shape, generator=torch.Generator().manual_seed(1)) < 0.3, -100)


AXES: WeakValueDictionary[str, CollectiveAxis] = WeakValueDictionary()


def the_axis() -> CollectiveAxis:
    """The one of this process, for as long as somebody holds it: it holds a process group."""
    return AXES.setdefault("world", axis())


class Cut(torch.autograd.Function):
    """This rank's columns of a whole output; what it passes back is its summand of the whole gradient."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor) -> Tensor:
        return columns(whole, axis())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        over = the_axis()
        whole = grad.new_zeros((*grad.shape[:-1], grad.shape[-1] * over.size))
        whole[..., over.rank * grad.shape[-1] :][..., : grad.shape[-1]] = grad
        return whole[..., :V]


def cut(module: nn.Module, args: Any, output: Tensor) -> VocabularyShard:
    return VocabularyShard.wrap(Cut.apply(output), vocabulary=V, axis=the_axis())


def gradients_of(model: nn.Module, loss_of: Callable[[nn.Module], Tensor], parts: bool) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    loss = loss_of(model)
    assert type(loss) is Tensor
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    if parts:
        for gradient in gradients:
            dist.all_reduce(gradient)
    return loss.detach(), gradients


def hugging_face(rank: int) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": V, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "use_cache": False,
    }  # fmt: skip
    torch.manual_seed(0)
    llama, gemma = LlamaForCausalLM(LlamaConfig(**sizes)), Gemma2ForCausalLM(
        Gemma2Config(**sizes, final_logit_softcapping=0.5, attn_implementation="eager")
    )  # fmt: skip
    ways: list[tuple[nn.Module, Callable[[nn.Module], Tensor]]] = [
        (llama, lambda model: model(input_ids=IDS, labels=LABELS).loss),
        (llama, lambda model: model(input_ids=IDS, labels=LABELS, num_items_in_batch=torch.tensor(20)).loss),
        (llama, lambda model: model(input_ids=IDS, labels=LABELS, num_items_in_batch=20).loss),
        (llama, lambda model: F.cross_entropy(model(input_ids=IDS).logits.transpose(1, 2), LABELS)),
        (llama, lambda model: nn.CrossEntropyLoss()(model(IDS).logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())),
        (gemma, lambda model: model(input_ids=IDS, labels=LABELS).loss),
    ]  # fmt: skip
    held = the_axis()
    for model, loss_of in ways:
        wanted = gradients_of(model, loss_of, parts=False)
        hook = model.lm_head.register_forward_hook(cut)
        got = gradients_of(model, loss_of, parts=True)
        logits_shard = model(input_ids=IDS).logits
        assert isinstance(logits_shard, VocabularyShard)
        torch.testing.assert_close(logits_shard.argmax(-1), logits_shard.whole().argmax(-1))
        assert logits_shard.axis is held
        hook.remove()
        torch.testing.assert_close(got[0], wanted[0], rtol=1e-5, atol=1e-6)
        for one, two in zip(got[1], wanted[1], strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def test_hugging_face_computes_its_own_loss_on_shards(ranks: RankPool) -> None:
    ranks(2, hugging_face, timeout=55)


def metrics(rank: int) -> None:
    over = axis()
    target = IDS[:, :5]
    for make in (
        lambda: Accuracy("multiclass", num_classes=V),
        lambda: Accuracy("multiclass", num_classes=V, average="micro", ignore_index=3),
        lambda: Accuracy("multiclass", num_classes=V, top_k=4),
    ):
        flat = lambda x, make=make: _measured(make(), x.detach().flatten(0, 1), target.flatten())  # noqa: E731
        folded = lambda x, make=make: _measured(make(), x.detach().transpose(1, 2), target)  # noqa: E731
        compare(flat, logits(2, 5, V, dtype=torch.float32), over)
        compare(folded, logits(2, 5, V, dtype=torch.float32), over)
    for ignored in (None, 3):
        compare(
            lambda x, ignored=ignored: _measured(Perplexity(ignore_index=ignored), x.detach(), target),
            logits(2, 5, V, dtype=torch.float32),
            over,
            rtol=1e-5,
        )


def _measured(metric: Any, predictions: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    step = metric(predictions, target)
    assert type(step) is Tensor
    return step, metric.compute()


def test_metrics_of_torchmetrics_work_on_shards(ranks: RankPool) -> None:
    ranks(2, metrics)


class Evaluated(L.LightningModule):
    def __init__(self, shards: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(V, 4), nn.Linear(4, V)
        if shards:
            self.head.register_forward_hook(cut)
        self.accuracy = Accuracy("multiclass", num_classes=V, top_k=5)

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.head(self.embed(batch))
        self.accuracy(logits.flatten(0, 1), batch.flatten())
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.log("loss", F.cross_entropy(logits.flatten(0, 1), batch.flatten()))
        self.log("entropy", -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean())
        self.log("norm", logits.norm())
        return F.cross_entropy(logits.flatten(0, 1), batch.flatten())

    def predict_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        logits = self.head(self.embed(batch))
        return {"ids": logits.argmax(-1), "logits": logits}


def evaluated(rank: int) -> tuple[list[dict[str, float]], Tensor, Tensor]:
    held, found, predicted = the_axis(), [], []
    for shards in (False, True):
        trainer = L.Trainer(
            accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False,
        )  # fmt: skip
        module, loader = Evaluated(shards), DataLoader(IDS, batch_size=1)
        found.append(trainer.validate(module, loader, verbose=False)[0])
        predicted.append(trainer.predict(module, loader))
    whole, cut_in_columns = predicted
    assert isinstance(cut_in_columns[0]["logits"], VocabularyShard)
    assert cut_in_columns[0]["logits"].axis is held
    torch.testing.assert_close(
        torch.cat([p["logits"] for p in cut_in_columns]).whole(), torch.cat([p["logits"] for p in whole])
    )
    return found, torch.cat([p["ids"] for p in whole]), torch.cat([p["ids"] for p in cut_in_columns])


def test_a_trainer_validates_and_predicts_with_shards(ranks: RankPool) -> None:
    for (whole, cut_in_columns), ids, same in ranks(2, evaluated):
        assert whole.keys() == {"accuracy", "loss", "entropy", "norm"}
        assert cut_in_columns == pytest.approx(whole, rel=1e-5)
        assert torch.equal(ids, same)

"""Models as people adapt them and write their steps around them, each an ordinary LightningModule."""

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_5d.models import LanguageModel
from tests.modules import TinyLM
from tests.tensor_parallel.models import hugging_face
from tests.tensor_parallel.parity import decoder

VOCABULARY = 61


class Pretrained(L.LightningModule):
    """A model of the transformers library whose step is written by hand."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2, eps=1e-4)


class ShiftedByHand(Pretrained):
    """Compares the logits of each token with the next one, where both count."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids, counts = batch["input_ids"], batch["attention_mask"]
        logits = self.model(input_ids=ids, attention_mask=counts).logits
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        return (losses * counts[:, 1:]).sum() / counts[:, 1:].sum()


def shifted_by_hand() -> L.LightningModule:
    """Llama without the loss of its own."""
    return ShiftedByHand(hugging_face("Llama", initializer_range=0.2))


def masked(**changes: Any) -> L.LightningModule:
    """BERT with its own loss of masked tokens."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48}
    layers: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return Pretrained(BertForMaskedLM(BertConfig(**{**sizes, **layers, **dropout, **changes})))


def dropping(**rates: float) -> L.LightningModule:
    """BERT that drops features of tokens."""
    return masked(hidden_dropout_prob=0.3, **rates)


def learned_positions(checkpointing: bool = False, **changes: Any) -> L.LightningModule:
    """GPT-2, whose blocks are computed again in backward, if wanted, by the library."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**{**sizes, "initializer_range": 0.2, **dropout, **changes}))
    if checkpointing:
        model.gradient_checkpointing_enable()
    return Pretrained(model)


class ComputedAgain(TinyLM):
    """Blocks that its own forward computes again in backward."""

    reentrant = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        logits: Tensor = self.head(x)
        return logits


class ComputedAgainReentrant(ComputedAgain):
    """The same in the older way of torch."""

    reentrant = True


class Penalized(LanguageModel):
    """Adds the squared gradient of its loss with respect to its logits or to its embeddings."""

    inner = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        kept: list[Tensor] = []
        handle = self.decoder.embed_tokens.register_forward_hook(lambda *a: kept.append(a[2])) if self.inner else None
        logits = self(batch["input_ids"])
        if handle is not None:
            handle.remove()
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        (gradient,) = torch.autograd.grad(loss, kept[0] if self.inner else logits, create_graph=True)
        return loss + 100 * gradient.square().sum()


class PenalizedInside(Penalized):
    """With respect to what comes out of a module inside."""

    inner = True


def penalized(kind: type[Penalized] = Penalized) -> L.LightningModule:
    """The reference model with that penalty."""
    torch.manual_seed(0)
    return kind(**decoder()().hparams)

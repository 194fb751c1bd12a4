"""What people do to models with experts before they train them, and around their steps."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_5d.models import LanguageModel
from tests.expert_parallel.hugging_face_models import BALANCED
from tests.expert_parallel.hugging_face_models import model as hugging_face
from tests.expert_parallel.test_training import mixture
from tests.tensor_parallel.models import LoRA
from tests.tensor_parallel.parity import Dealt, Rows
from tests.tensor_parallel.test_hugging_face import Labelled, Padded


def rows(count: int = 16, tokens: int = 6) -> Dealt:
    return Dealt(Rows(count, tokens), 4)


class Sentences(Padded):
    """Rows of one length: the mean over data ranks of their means is that of one process."""

    def __init__(self, count: int = 12, tokens: int = 7) -> None:
        super().__init__(count, tokens)
        self.ids = torch.randint(3, 61, (count, tokens), generator=torch.Generator().manual_seed(1))
        self.mask = torch.ones_like(self.ids)


def sentences(count: int = 12) -> Dealt:
    return Dealt(Sentences(count), 4)


def changed(change: Callable[[LanguageModel], None], **moe: Any) -> LanguageModel:
    """The reference model, after somebody has worked on it."""
    module = mixture(**{"shared": 1, **moe})()
    change(module)
    return module


def freeze_experts(module: LanguageModel) -> None:
    for layer in module.decoder.layers:
        layer.mlp.experts.requires_grad_(False)


def only_routers(module: LanguageModel) -> None:
    module.requires_grad_(False)
    for layer in module.decoder.layers:
        layer.mlp.gate.requires_grad_(True)


def only_one_weight(module: LanguageModel) -> None:
    """Of the experts of one layer."""
    module.requires_grad_(False)
    module.decoder.layers[0].mlp.experts.down_proj.requires_grad_(True)


def adapt_attention(module: LanguageModel) -> None:
    """Adapters around layers, on a frozen model."""
    module.requires_grad_(False)
    for layer in module.decoder.layers:
        attention = layer.self_attn
        attention.q_proj, attention.o_proj = LoRA(attention.q_proj), LoRA(attention.o_proj)


def compile_block(module: LanguageModel) -> None:
    module.decoder.layers[0].compile(backend="eager")


class Spreading(Labelled):
    """A model of Hugging Face with experts and its own loss."""

    def __init__(self, kind: str, again: bool = False, **changes: Any) -> None:
        super(Labelled, self).__init__()
        self.model = hugging_face(kind, initializer_range=0.2, experts_implementation="eager", **changes)
        if again:
            self.model.gradient_checkpointing_enable()


class Twice(LanguageModel):
    """Each step has two losses and two optimizers; the blocks are in both, or in the second loss alone."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        first, second = self.optimizers()
        # Experts run twice before one backward.
        loss = self.loss(batch) + 0.5 * self.loss({**batch, "input_ids": batch["input_ids"].flip(1)})
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        first.step()
        first.zero_grad()
        second.zero_grad()
        # And have no part in the other loss at all.
        hidden = self.decoder.embed_tokens(batch["input_ids"])
        other = self.decoder.lm_head(hidden).square().mean()
        self.manual_backward(other)
        second.step()
        second.zero_grad()
        return {"loss": loss.detach()}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        blocks = list(self.decoder.layers.parameters())
        inside = {id(parameter) for parameter in blocks}
        others = [parameter for parameter in self.parameters() if id(parameter) not in inside]
        return [torch.optim.SGD(blocks, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=3e-3, foreach=True)]


def twice() -> Twice:
    torch.manual_seed(0)
    return Twice(decoder=mixture(shared=1)().hparams["decoder"])


RUNS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "frozen experts": (partial(changed, freeze_experts), rows),
    "only routers": (partial(changed, only_routers), rows),
    "one weight": (partial(changed, only_one_weight), rows),
    "adapters on attention": (partial(changed, adapt_attention), rows),
    "Mixtral plain": (partial(Spreading, "Mixtral"), sentences),
    "Mixtral": (partial(Spreading, "Mixtral", **BALANCED), sentences),
    "Qwen3Moe": (partial(Spreading, "Qwen3Moe", **BALANCED), sentences),
    "Mixtral again": (partial(Spreading, "Mixtral", again=True, **BALANCED), sentences),
    "Qwen3Moe again, without balance": (partial(Spreading, "Qwen3Moe", again=True), sentences),
}
TWICE = {"twice": (twice, rows)}
COMPILED = {"compiled": (partial(changed, compile_block), partial(rows, 8))}

"""What people do to models before they train them: adapters, frozen parts, compiled blocks, several optimizers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_5d import TensorParallel, ZeRO
from lightning_5d.models import LanguageModel
from tests.ranks.pool import RankPool
from tests.tensor_parallel.models import LoRA
from tests.tensor_parallel.parity import compare, decoder

SEQUENCE = pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp+sp"])


def changed(change: Callable[[LanguageModel], None], layers: int = 3) -> LanguageModel:
    module = decoder(num_layers=layers)()
    change(module)
    return module


def adapt(module: LanguageModel) -> None:
    """Adapters around layers of both kinds, on a frozen model."""
    module.requires_grad_(False)
    for layer in module.decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        attention.q_proj, attention.o_proj = LoRA(attention.q_proj), LoRA(attention.o_proj)
        mlp.up_proj, mlp.down_proj = LoRA(mlp.up_proj), LoRA(mlp.down_proj)


def freeze(module: LanguageModel) -> None:
    """The embedding, a whole block, and one layer of another."""
    for part in (module.decoder.embed_tokens, module.decoder.layers[0], module.decoder.layers[1].mlp.up_proj):
        part.requires_grad_(False)


def compile_blocks(module: LanguageModel) -> None:
    for layer in module.decoder.layers:
        layer.compile(backend="aot_eager")


@pytest.mark.parametrize(
    ("change", "stage", "sequence"),
    [(adapt, 0, True), (adapt, 3, False), (adapt, 3, True), (freeze, 0, False), (freeze, 3, True)],
)
def test_a_changed_model_trains_as_in_one_process(
    ranks: RankPool, change: Callable[[LanguageModel], None], stage: int, sequence: bool
) -> None:
    tensor = TensorParallel(2, sequence_parallel=sequence)
    compare(ranks, partial(changed, change), tensor, ZeRO(stage=stage), world=4)


def test_compiled_blocks_train_as_in_one_process(ranks: RankPool) -> None:
    tensor = TensorParallel(2, sequence_parallel=True)
    compare(ranks, partial(changed, compile_blocks, layers=2), tensor, world=2, rows=8)


class ByHand(LanguageModel):
    """Two optimizers, stepped by hand."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss = self.loss(batch)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": loss.detach()}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        blocks = list(self.decoder.layers.parameters())
        inside = {id(parameter) for parameter in blocks}
        others = [parameter for parameter in self.parameters() if id(parameter) not in inside]
        return [torch.optim.SGD(blocks, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=3e-3, foreach=True)]


def by_hand() -> ByHand:
    torch.manual_seed(0)
    return ByHand(decoder=decoder()().hparams["decoder"])


@SEQUENCE
def test_two_optimizers_stepped_by_hand(ranks: RankPool, sequence: bool) -> None:
    tensor = TensorParallel(2, sequence_parallel=sequence)
    compare(ranks, by_hand, tensor, ZeRO(stage=1), world=4, gradient_clip_val=None)

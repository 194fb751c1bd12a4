import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_5d.models.language_model import LanguageModel
from tests.modules import TinyLM, batches
from tests.pipeline_parallel.stage.pipelines import assert_same_gradients

# One tuple a rank: stages in order, interleaved, V-shaped, bidirectional.
RANKS = {
    "two": [(0,), (1,)],
    "four": [(0,), (1,), (2,), (3,)],
    "interleaved": [(0, 2), (1, 3)],
    "v": [(0, 3), (1, 2)],
    "all here": [(0, 1, 2, 3)],
    "one stage": [(0,)],
}


class Lit(L.LightningModule):
    """Any network behind an ordinary step."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)


def mlp(inplace: bool = False) -> Lit:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [nn.Linear(6, 6), nn.ReLU(inplace=inplace)]
    return Lit(nn.Sequential(*layers, nn.Linear(6, 2)))


def pairs(count: int, inputs: int = 6, outputs: int = 2) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(4, inputs), torch.randn(4, outputs)) for _ in range(count)]


@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_an_mlp_keeps_its_gradients(ranks: list[tuple[int, ...]]) -> None:
    assert_same_gradients(mlp(), pairs(3), ranks)


@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_code_between_blocks_may_write_to_what_a_block_returned(ranks: list[tuple[int, ...]]) -> None:
    assert_same_gradients(mlp(inplace=True), pairs(3), ranks)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_a_language_model_keeps_its_gradients(ranks: list[tuple[int, ...]], tied: bool) -> None:
    module = TinyLM(layers=5, tied=tied)
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    assert_same_gradients(module, batches(3), ranks)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_the_native_decoder_keeps_its_gradients(ranks: list[tuple[int, ...]], tied: bool) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 17, "hidden_size": 8, "intermediate_size": 12, "num_layers": 4, "num_heads": 2}
    module = LanguageModel({**sizes, "num_kv_heads": 1, "context_length": 8, "tie_embeddings": tied})
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    ids = torch.randint(0, 17, (3, 2, 7))
    assert_same_gradients(module, [{"input_ids": row[:, :-1], "labels": row[:, 1:]} for row in ids], ranks)

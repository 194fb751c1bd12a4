import copy
import pickle

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_5d.absent import Absent
from lightning_5d.models.language_model import LanguageModel
from tests.modules import Block, TinyLM, batches
from tests.pipeline_parallel.stage.pipelines import Pipeline, assert_same_gradients, quiet

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
    assert_same_gradients(quiet(TinyLM(layers=5, tied=tied)), batches(3), ranks)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_the_native_decoder_keeps_its_gradients(ranks: list[tuple[int, ...]], tied: bool) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 17, "hidden_size": 8, "intermediate_size": 12, "num_layers": 4, "num_heads": 2}
    module = LanguageModel({**sizes, "num_kv_heads": 1, "context_length": 8, "tie_embeddings": tied})
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    ids = torch.randint(0, 17, (3, 2, 7))
    assert_same_gradients(module, [{"input_ids": row[:, :-1], "labels": row[:, 1:]} for row in ids], ranks)


@pytest.mark.parametrize("split", [[0, 6], [6, 0], [2, 0, 4], [0, 3, 3, 0], [0, 0, 6], [1, 5]], ids=str)
def test_stages_without_blocks_change_nothing(split: list[int]) -> None:
    assert_same_gradients(mlp(inplace=True), pairs(2), [(stage,) for stage in range(len(split))], split=split)
    assert_same_gradients(quiet(TinyLM(layers=6)), batches(2), [(stage,) for stage in range(len(split))], split=split)


def test_a_stage_holds_its_own_weights_under_their_own_names() -> None:
    module = TinyLM(layers=4)
    pipeline = Pipeline(module, [(0, 3), (1, 2)], split=[1, 1, 1, 1])
    names = [set(dict(cut.named_parameters())) for cut in pipeline.modules]
    whole = set(dict(module.named_parameters()))
    assert names[0] | names[1] == whole
    assert names[0] == {n for n in whole if n.startswith(("embed", "head", "layers.0.", "layers.3."))}
    assert [set(cut.state_dict()) for cut in pipeline.modules] == names
    assert isinstance(pipeline.modules[1].layers[0], Block)
    assert [type(m).__name__ for m in pipeline.modules[1].layers] == [
        "AbsentModuleBlock",
        "Block",
        "Block",
        "AbsentModuleBlock",
    ]


def test_everything_that_a_rank_holds_is_in_place_outside_of_runs_and_after_errors() -> None:
    pipeline = Pipeline(TinyLM(layers=4), [(0, 3), (1, 2)])
    module, cut = pipeline.modules[0], pipeline.cuts[0]
    before = dict(module.named_modules())
    seen = []

    def step(batch: Tensor) -> Tensor:
        seen.append(set(dict(module.named_parameters())))
        module(batch)
        raise AssertionError("the boundary was passed")

    cut.run(0, step, (batches(1)[0],))
    assert not any(name.startswith(("head", "layers.3")) for name in seen[0])
    assert dict(module.named_modules()) == before

    def wrong(batch: Tensor) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        cut.run(0, wrong, (batches(1)[0],))
    assert dict(module.named_modules()) == before


def test_parts_are_modules_that_one_stage_uses_alone() -> None:
    pipeline = Pipeline(TinyLM(layers=4), [(0, 3), (1, 2)])
    module, parts = pipeline.modules[0], pipeline.cuts[0].parts
    assert [part.stage for part in parts] == [0, 3]
    assert parts[0].modules == (module.embed, module.layers[0])
    assert parts[1].modules == (module.layers[3], module.head)
    tied = Pipeline(TinyLM(layers=4, tied=True), [(0, 3), (1, 2)])
    module, parts = tied.modules[0], tied.cuts[0].parts
    assert [part.modules for part in parts] == [(module.layers[0],), (module.layers[3],)]


def test_a_stage_with_nothing_to_train_keeps_the_gradients_of_others() -> None:
    module = TinyLM(layers=4)
    module.embed.requires_grad_(False)
    module.layers[0].requires_grad_(False)
    pipeline = assert_same_gradients(quiet(module), batches(2), [(0,), (1,)], split=[1, 3])
    assert not any(parameter.requires_grad for parameter in pipeline.modules[0].parameters())


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, base.in_features)), nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_adapters_on_frozen_weights_keep_their_gradients(ranks: list[tuple[int, ...]]) -> None:
    module = TinyLM(layers=4).requires_grad_(False)
    for block in module.layers:
        block.up = Adapter(block.up)
    assert_same_gradients(quiet(module), batches(2), ranks)


def test_a_copy_or_a_pickle_of_a_cut_module_holds_nobody_else() -> None:
    pipeline = Pipeline(TinyLM(layers=4), [(0,), (1,)])
    for copied in (copy.deepcopy(pipeline.modules[1]), pickle.loads(pickle.dumps(pipeline.modules[1].layers[0]))):
        stub = copied if isinstance(copied, Absent) else copied.layers[0]
        assert stub.runs is None
        with pytest.raises(MisconfigurationException, match=r"layers\.0 belongs to stage 0"):
            stub(torch.ones(1))

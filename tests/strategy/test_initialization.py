"""Values at the start do not depend on the layout."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_5d.initialization import materialize, module_seed
from tests.modules import Block, TinyLM, loader
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.trainers import whole, zero

TRAINER = {"backend": None, "timeout": 50.0}


def still(**arguments: Any) -> dict[str, Any]:
    """A fit that sets everything up and takes no step."""
    return {"limit_train_batches": 0, "limit_val_batches": 0, **arguments}


class RankDependent(TinyLM):
    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)
        self.register_buffer("scale", torch.full((3,), float(seed)))


def _seeds(rank: int, stage: int, ranks: int, replicate: int) -> tuple[dict[str, Tensor], Tensor]:
    module = RankDependent(seed=rank + 5)
    zero(stage, ranks, replicate, **still()).fit(module, loader(8))
    return whole(module), module.scale.clone()  # type: ignore[operator]


@pytest.mark.parametrize(("stage", "world", "replicate"), [(0, 2, 1), (1, 2, 1), (2, 4, 2), (3, 3, 1), (3, 4, 2)])
def test_rank_0_s_weights_and_buffers_are_everyone_s(ranks: RankPool, stage: int, world: int, replicate: int) -> None:
    expected = TinyLM(seed=5)
    for weights, scale in ranks(world, _seeds, stage, world, replicate, **TRAINER):
        for name, parameter in expected.named_parameters():
            assert torch.equal(weights[name], parameter)
        assert torch.equal(scale, torch.full((3,), 5.0))


class Late(TinyLM):
    """Makes its layers in configure_model."""

    def __init__(self) -> None:
        super().__init__(layers=0)

    def configure_model(self) -> None:
        if not self.layers:  # type: ignore[operator]
            self.layers = nn.ModuleList(Block(8) for _ in range(3))


def _late(rank: int, stage: int, ranks: int) -> dict[str, Tensor]:
    torch.manual_seed(rank)
    module = Late()
    zero(stage, ranks, **still()).fit(module, loader(8))
    return whole(module)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_module_built_in_configure_model_starts_equal_on_all_ranks(ranks: RankPool, stage: int) -> None:
    first, second = ranks(2, _late, stage, 2, **TRAINER)
    assert set(first) == set(dict(TinyLM().named_parameters()))
    for name in first:
        assert torch.equal(first[name], second[name])


def _meta(rank: int, stage: int | None, ranks: int, tied: bool, seed: str) -> dict[str, Tensor]:
    torch.manual_seed(1000 + rank)
    trainer = zero(stage or 0, ranks, **still(max_epochs=1))
    with trainer.init_module(empty_init=True):
        module = TinyLM(tied=tied)
    assert all(parameter.is_meta for parameter in module.parameters())
    trainer.fit(module, loader(8))
    if tied:
        assert module.head.weight is module.embed.weight
        assert len(list(module.parameters())) == len(dict(TinyLM(tied=True).named_parameters()))
    return whole(module)


@pytest.mark.parametrize("tied", [False, True])
def test_meta_weights_are_a_function_of_seed_and_name_only(ranks: RankPool, tied: bool) -> None:
    arguments = {**TRAINER, "env": {"PL_GLOBAL_SEED": "7"}}
    one = ranks(1, _meta, 0, 1, tied, "7", **arguments)[0]
    for stage, world in [(0, 2), (1, 2), (3, 2), (3, 3), (2, 4)]:
        for found in ranks(world, _meta, stage, world, tied, "7", **arguments):
            assert found.keys() == one.keys()
            for name in one:
                assert torch.equal(found[name], one[name]), (stage, world, name)
    other = ranks(1, _meta, 0, 1, tied, "8", **{**TRAINER, "env": {"PL_GLOBAL_SEED": "8"}})[0]
    assert not torch.equal(other["embed.weight"], one["embed.weight"])


def test_layers_of_one_shape_start_different() -> None:
    with torch.device("meta"):
        module = TinyLM()
    materialize(module, torch.device("cpu"), seed=3)
    assert not torch.equal(module.layers[0].up.weight, module.layers[1].up.weight)  # type: ignore[union-attr,arg-type]
    assert module_seed(3, "a") != module_seed(3, "b") != module_seed(4, "b")


def test_materialized_values_have_the_distribution_of_the_module_s_own_initialization() -> None:
    with torch.device("meta"):
        layer = nn.Linear(400, 300)
    materialize(layer, torch.device("cpu"), seed=0)
    bound = 400**-0.5
    assert layer.weight.abs().max() <= bound
    assert float(layer.weight.detach().std()) == pytest.approx(2 * bound / 12**0.5, rel=0.02)


def test_materialize_leaves_the_caller_s_random_numbers_alone() -> None:
    with torch.device("meta"):
        layer = nn.Linear(3, 3)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    materialize(layer, torch.device("cpu"), seed=5)
    assert torch.equal(torch.rand(3), expected)


class Bare(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(2))


def _bare(rank: int) -> None:
    trainer = zero(1, 2, **still())
    with trainer.init_module(empty_init=True):
        module = Bare()
    trainer.fit(module, loader(8))


def test_a_meta_tensor_nobody_can_fill_is_named(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"1 tensors are on the meta device .* temperature"):
        ranks(2, _bare, **TRAINER)


def _hugging_face(rank: int, stage: int, ranks: int) -> dict[str, Tensor]:
    import lightning as L
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )

    class Lit(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = LlamaForCausalLM(config)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = zero(stage, ranks, max_epochs=1, limit_train_batches=2)
    with trainer.init_module(empty_init=True):
        module = Lit()
    trainer.fit(module, loader(8))
    inv = module.model.model.rotary_emb.inv_freq
    return {**whole(module), "inv_freq": inv.clone()}


def test_a_hugging_face_model_on_the_meta_device_trains(ranks: RankPool) -> None:
    pytest.importorskip("transformers")
    first, second = ranks(2, _hugging_face, 3, 2, **TRAINER)
    for name in first:
        assert torch.isfinite(first[name]).all(), name
        assert torch.equal(first[name], second[name])
    assert first["inv_freq"].max() == pytest.approx(1.0)

"""A block of experts equals known models', computes what it says it costs, and refuses settings that do not fit."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_5d.expert_parallel.config import MoEConfig
from lightning_5d.expert_parallel.counted import Counted
from lightning_5d.expert_parallel.experts import Experts, compute_experts
from lightning_5d.expert_parallel.moe import MoE
from lightning_5d.expert_parallel.survey import found_experts
from lightning_5d.model_flops import ModelFlops
from lightning_5d.models import Decoder, DecoderConfig
from lightning_5d.models.activations import block_activation_bytes
from lightning_5d.pipeline_parallel.stage import dissect, estimate_costs
from lightning_5d.plan import find_plan
from tests.strategy.test_activation_checkpointing import FULL, SELECTIVE, held_by_blocks

HIDDEN, EXPERTS, INNER = 12, 6, 8


def hidden(seed: int = 0) -> Tensor:
    return torch.randn(2, 9, HIDDEN, generator=torch.Generator().manual_seed(seed))


def block(**settings) -> MoE:
    torch.manual_seed(1)
    return MoE(HIDDEN, MoEConfig(**{"experts": EXPERTS, "intermediate_size": INNER, **settings}), 0.5, 0.5)


def mixtral(config: MoEConfig):
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock

    return MixtralSparseMoeBlock(
        MixtralConfig(
            hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=config.top_k
        )
    )


def qwen2(config: MoEConfig):
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeConfig, Qwen2MoeSparseMoeBlock

    return Qwen2MoeSparseMoeBlock(
        Qwen2MoeConfig(
            hidden_size=HIDDEN,
            moe_intermediate_size=INNER,
            shared_expert_intermediate_size=INNER * config.shared,
            num_experts=EXPERTS,
            num_experts_per_tok=config.top_k,
            norm_topk_prob=config.normalize,
        )
    )


def deepseek(config: MoEConfig):
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3MoE

    return DeepseekV3MoE(
        DeepseekV3Config(
            hidden_size=HIDDEN,
            moe_intermediate_size=INNER,
            n_shared_experts=config.shared,
            n_routed_experts=EXPERTS,
            num_experts_per_tok=config.top_k,
            n_group=config.groups,
            topk_group=config.top_groups,
            routed_scaling_factor=config.scale,
        )
    )


SIGMOID = {"scores": "sigmoid", "bias_rate": 0.001, "groups": 3, "top_groups": 2, "scale": 2.5, "shared": 2, "top_k": 3}


@pytest.mark.parametrize(
    ("model", "settings"),
    [(mixtral, {}), (qwen2, {"shared": 3, "shared_gate": True, "normalize": False}), (deepseek, SIGMOID)],
    ids=["mixtral", "qwen2", "deepseek"],
)
def test_output_and_gradients_are_those_of_hugging_face(model, settings):
    pytest.importorskip("transformers")
    ours = block(**settings)
    theirs = model(ours.config)
    if ours.gate.expert_bias is not None:
        ours.gate.expert_bias.copy_(torch.linspace(-0.3, 0.3, EXPERTS))
    # By name, but for these.
    renamed = {"gate.expert_bias": "gate.e_score_correction_bias"}
    if model is qwen2:
        renamed |= {f"shared_experts.{k}_proj.weight": f"shared_expert.{k}_proj.weight" for k in ("gate", "up", "down")}
    theirs.load_state_dict({renamed.get(name, name): value for name, value in ours.state_dict().items()})
    x, y = hidden().requires_grad_(), hidden().requires_grad_()
    mine, other = ours(x), theirs(y)
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    mine.square().sum().backward()
    other.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)
    for name, parameter in ours.named_parameters():
        grad = theirs.get_parameter(renamed.get(name, name)).grad
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_experts_that_nobody_chooses_get_zeros_as_gradients():
    module = block(top_k=1, normalize=False, bias_rate=0.0)
    module.gate.expert_bias[2] = 100.0
    module(hidden()).sum().backward()
    for weight in module.experts.parameters():
        assert weight.grad[2].abs().max() > 0
        assert weight.grad[[0, 1, 3, 4, 5]].equal(torch.zeros_like(weight.grad[:5]))


def test_no_token_at_all_gives_zeros_as_gradients():
    module = block(shared=1, balance=0.1)
    y, losses = module(torch.zeros(1, 0, HIDDEN, requires_grad=True))
    (y.sum() + losses["balance"]).backward()
    assert y.shape == (1, 0, HIDDEN)
    assert all(parameter.grad.equal(torch.zeros_like(parameter)) for parameter in module.parameters())


def test_losses_come_with_the_output_only_if_there_are_some():
    assert isinstance(block()(hidden()), Tensor)
    assert list(block(balance=0.1)(hidden())[1]) == ["balance"]
    assert list(block(balance=0.1, z=0.1)(hidden())[1]) == ["balance", "z"]


def test_the_block_and_its_router_count_alike():
    module, other = block(), Counted()
    module.counted = other
    assert module.gate.counted is other


def test_experts_are_found_with_what_may_be_cut():
    module = Decoder(DecoderConfig.preset("tiny", moe={"experts": 4, "top_k": 3, "intermediate_size": 8}))
    found = found_experts(module)
    assert [(each.name, each.count, each.top_k) for each in found] == [
        (f"layers.{i}.mlp.experts", 4, 3) for i in (0, 1)
    ]
    assert found[0].compute is compute_experts
    # Rows of gate and up, features of down: two halves of an expert together make the whole.
    experts = Experts(HIDDEN, MoEConfig(experts=2, intermediate_size=INNER), 0.5, 0.5)
    rows, counts = torch.randn(7, HIDDEN), torch.tensor([3, 4])
    gate, up = experts.gate_up_proj.chunk(2, found[0].tensor_dims["gate_up_proj"])
    parts = 0
    for half in range(2):
        part = Experts(HIDDEN, MoEConfig(experts=2, intermediate_size=INNER // 2))
        part.gate_up_proj.data = torch.cat((gate.chunk(2, 1)[half], up.chunk(2, 1)[half]), 1)
        part.down_proj.data = experts.down_proj.chunk(2, found[0].tensor_dims["down_proj"])[half]
        parts = parts + compute_experts(part, rows, counts)
    torch.testing.assert_close(parts, compute_experts(experts, rows, counts))


MOE = {"experts": 8, "top_k": 2, "intermediate_size": 48}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}


def test_model_flops_are_those_of_the_experts_that_tokens_are_sent_to():
    config = DecoderConfig(**SIZES, vocab_size=32, dense_layers=1, moe=MOE | {"shared": 1, "shared_gate": True})
    with ModelFlops() as counter:
        Decoder(config)(torch.zeros(2, 16, dtype=torch.long))
    h, tokens = 64, 32
    attention = 3 * h * h * tokens + 2 * h * 16 * tokens  # projections; two products with 16 keys or values
    dense = 3 * h * 96 * tokens
    sparse = (8 * h + (2 + 1) * 3 * h * 48 + h) * tokens
    assert counter.total == 6 * (2 * attention + dense + sparse + 32 * h * tokens)


def test_costs_of_stages_count_the_experts_that_a_token_is_sent_to():
    few, many = (Decoder(DecoderConfig(**SIZES, dense_layers=1, moe=MOE | {"experts": experts})) for experts in (8, 64))
    costs = [estimate_costs(module, dissect(module, find_plan(module))).blocks for module in (few, many)]
    h = 64
    assert costs[0]["layers.1"] - costs[0]["layers.0"] == 3 * (8 * h + 2 * 3 * h * 48 - 3 * h * 96)
    assert costs[1]["layers.1"] - costs[0]["layers.1"] == 3 * (64 - 8) * h


@pytest.mark.parametrize(
    "moe",
    [
        MOE,
        MOE | {"top_k": 1, "normalize": False, "experts": 16},
        MOE | {"shared": 2, "shared_gate": True, "scores": "sigmoid"},
    ],
)
@pytest.mark.parametrize(("mode", "recomputed"), [(None, "none"), (SELECTIVE, "selective"), (FULL, "full")])
def test_saved_bytes_are_nearly_those_of_the_formula(moe, mode, recomputed):
    config = DecoderConfig(**SIZES, moe=moe)
    expected = 2 * block_activation_bytes(config, 2, 64, 4, recomputed)
    assert held_by_blocks(Decoder(config), mode, 2, 64) == pytest.approx(expected, rel=0.03)
    dense = block_activation_bytes(replace(config, moe=None), 2, 64, 4, recomputed)
    assert block_activation_bytes(config, 2, 64, 4, recomputed, sparse=False) == dense


def test_all_that_does_not_fit_is_in_one_error_with_what_does():
    with pytest.raises(ValueError) as error:
        MoEConfig(top_k=9, balance=-0.1, z=float("nan"), scores="softmx", balance_scope="all", groups=3, scale=0)
    lines = str(error.value).splitlines()[1:]
    assert len(lines) == 7
    for part in (
        "top_k 9 is more than the 8 experts there are; 8 is the most",
        "balance is -0.1; it must be a number of at least 0",
        "z is nan",
        "scores 'softmx' is unknown; did you mean 'softmax'?",
        "'global', 'microbatch', 'sequence'",
        "groups 3 does not divide 8 experts; 2 is the nearest that works",
        "scale is 0",
    ):
        assert sum(part in line for line in lines) == 1, part


@pytest.mark.parametrize(
    ("settings", "message", "works"),
    [
        ({"experts": 0}, "experts is 0; it must be a whole number of at least 1", {"experts": 1, "top_k": 1}),
        ({"top_k": 2.0}, "top_k is 2.0; it must be a whole number", {"top_k": 2}),
        ({"top_k": True}, "top_k is True", {}),
        ({"shared": -1}, "shared is -1; it must be a whole number of at least 0", {"shared": 0}),
        ({"shared_gate": True}, "shared=1 makes one", {"shared_gate": True, "shared": 1}),
        ({"groups": 8, "top_groups": 2}, "groups 8 leaves one expert in each .* 4 is the nearest", {"groups": 4}),
        (
            {"groups": 2, "top_groups": 3},
            "more than the 2 groups there are; 2 is the most",
            {"groups": 2, "top_groups": 2},
        ),
        ({"groups": 4, "top_k": 3}, "top_groups 2 or top_k 2 works", {"groups": 4, "top_k": 3, "top_groups": 2}),
        ({"groups": 4, "top_k": 3}, "top_groups 2 or top_k 2 works", {"groups": 4, "top_k": 2}),
        ({"top_k": 1}, "the router would not learn; normalize=False works", {"top_k": 1, "normalize": False}),
        ({"bias_rate": -1}, "bias_rate is -1; it must be a number of at least 0 or None", {"bias_rate": 0}),
    ],
)
def test_what_an_error_names_works(settings, message, works):
    with pytest.raises(ValueError, match=message):
        MoEConfig(**settings)
    MoEConfig(**works)


def test_unknown_settings_are_named():
    with pytest.raises(ValueError, match=r"no setting 'topk'; did you mean 'top_k'"):
        MoEConfig.of({"topk": 2})
    with pytest.raises(TypeError, match="moe is a int"):
        MoEConfig.of(3)

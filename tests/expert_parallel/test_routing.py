"""Routers choose and weight as known models' do, in fp32 whatever is around them."""

import pytest
import torch
from torch import Tensor, nn

from lightning_5d.expert_parallel.config import MoEConfig
from lightning_5d.expert_parallel.counted import Counted
from lightning_5d.expert_parallel.routing import TopKRouter, choose

HIDDEN, EXPERTS, TOKENS = 12, 8, 32


def hidden(seed: int = 0) -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed))


def router(**settings) -> TopKRouter:
    torch.manual_seed(1)
    return TopKRouter(HIDDEN, MoEConfig(**{"experts": EXPERTS, "top_k": 3, **settings}), std=1.0)


def mixtral(_: MoEConfig) -> nn.Module:
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralTopKRouter

    return MixtralTopKRouter(MixtralConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=3))


def qwen(config: MoEConfig) -> nn.Module:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeTopKRouter

    return Qwen3MoeTopKRouter(
        Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=3, norm_topk_prob=config.normalize)
    )


def deepseek(config: MoEConfig) -> nn.Module:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3TopkRouter

    return DeepseekV3TopkRouter(
        DeepseekV3Config(
            hidden_size=HIDDEN,
            n_routed_experts=EXPERTS,
            num_experts_per_tok=3,
            n_group=config.groups,
            topk_group=config.top_groups,
            norm_topk_prob=config.normalize,
            routed_scaling_factor=config.scale,
        )
    )


DEEPSEEK = {"scores": "sigmoid", "bias_rate": 0.001, "groups": 4, "top_groups": 2, "scale": 2.5}


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (mixtral, {}),
        (qwen, {"normalize": True}),
        (qwen, {"normalize": False}),
        (deepseek, DEEPSEEK),
        (deepseek, DEEPSEEK | {"normalize": False, "groups": 2, "top_groups": 1, "scale": 1.0}),
    ],
    ids=["mixtral", "qwen normalised", "qwen", "deepseek", "deepseek not normalised"],
)
def test_choices_weights_and_gradients_are_those_of_hugging_face(model, settings):
    pytest.importorskip("transformers")
    ours = router(**settings)
    theirs = model(ours.config)
    theirs.weight.data.copy_(ours.weight.data)
    if ours.expert_bias is not None:
        bias = torch.linspace(-0.4, 0.4, EXPERTS)
        ours.expert_bias.copy_(bias)
        theirs.e_score_correction_bias.copy_(bias)
    x, y = hidden().requires_grad_(), hidden().requires_grad_()
    routed, (logits, weights, index) = ours(x), theirs(y)
    # The order of the experts of a token means nothing.
    for mine, other in (
        (routed.index_NK.sort().values, index.sort().values),
        (routed.weights_NK.gather(1, routed.index_NK.argsort()), weights.gather(1, index.argsort())),
        (routed.logits_NE, logits),
    ):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    factors = torch.linspace(-1, 1, EXPERTS)
    (routed.weights_NK * factors[routed.index_NK]).sum().backward()
    (weights * factors[index]).sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-6)


def test_softmax_over_the_chosen_is_the_normalised_softmax():
    routed = router()(hidden())
    by_hand = routed.logits_NE.gather(1, routed.index_NK).softmax(-1)
    torch.testing.assert_close(routed.weights_NK, by_hand)


def test_a_bias_changes_the_choice_and_not_the_weights():
    plain, biased = router(scores="sigmoid", normalize=False), router(scores="sigmoid", normalize=False, bias_rate=0.0)
    biased.expert_bias[5] = 10.0
    before, after = plain(hidden()), biased(hidden())
    assert (after.index_NK == 5).any(1).all()
    assert not (before.index_NK == 5).any(1).all()
    torch.testing.assert_close(after.weights_NK, before.logits_NE.sigmoid().gather(1, after.index_NK))


def test_groups_are_worth_their_two_best():
    # Group 0 has the best expert of all, group 1 the best two together.
    scores = torch.tensor([[0.9, 0.0, 0.0, 0.6, 0.5, 0.1]])
    assert choose(scores, None, 2, groups=2, top_groups=1).tolist() == [[3, 4]]
    assert choose(scores, None, 2).tolist() == [[0, 3]]
    # With a bias below 0 all scores are below the 0 of what is shut.
    assert choose(scores, torch.full((6,), -2.0), 2, groups=2, top_groups=1).tolist() == [[3, 4]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_router_computes_in_fp32_under_autocast_and_from_16_bit_inputs(dtype):
    module, x = router(), hidden().to(dtype)
    with torch.autocast("cpu", dtype=dtype):
        routed = module(x)
    expected = x.float() @ module.weight.t()
    for value in (routed.logits_NE, routed.weights_NK, routed.scores_NE):
        assert value.dtype == torch.float32
    torch.testing.assert_close(routed.logits_NE, expected)


def test_the_bias_stays_fp32_when_all_else_becomes_16_bits():
    module = router(bias_rate=0.001)
    module.expert_bias += torch.arange(EXPERTS) / 1000 + 1
    before = module.expert_bias.clone()
    for converted in (nn.Sequential(module).to(torch.bfloat16), nn.Sequential(module).half()):
        assert converted[0].weight.dtype != torch.float32
        assert converted[0].expert_bias.dtype == torch.float32
        assert converted[0].expert_bias.equal(before)
    assert module.to("meta").expert_bias.dtype == torch.float32
    assert module.to_empty(device="cpu").half().expert_bias.dtype == torch.float32


def test_checkpoints_hold_the_bias_and_not_the_load():
    module = router(bias_rate=0.001)
    module(hidden())
    module.expert_bias[2] = 3.0
    assert set(module.state_dict()) == {"weight", "expert_bias"}
    other = router(bias_rate=0.001)
    other.load_state_dict(module.state_dict())
    assert other.expert_bias.equal(module.expert_bias)
    assert set(router().state_dict()) == {"weight"}


class Some(Counted):
    """The last rows are padding."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def real(self, rows: int) -> Tensor:
        return torch.arange(rows) < self.tokens


def test_padding_is_not_counted_and_nothing_in_it_reaches_a_gradient():
    module, whole = router(), router()
    module.counted = Some(20)
    x = hidden()
    x[20:] = float("nan")
    routed, expected = module(x), whole(hidden()[:20])
    assert module.load.equal(whole.load)
    routed.weights_NK[:20, 0].sum().backward()
    expected.weights_NK[:, 0].sum().backward()
    torch.testing.assert_close(module.weight.grad, whole.weight.grad)

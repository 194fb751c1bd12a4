"""Losses of experts: what they are, which gradients they give, and that neither padding nor the cut of a batch changes them."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_5d.expert_parallel.balance import Losses, routing_losses
from lightning_5d.expert_parallel.bias import move_biases
from lightning_5d.expert_parallel.config import MoEConfig
from lightning_5d.expert_parallel.counted import Counted
from lightning_5d.expert_parallel.moe import MoE
from lightning_5d.expert_parallel.routing import TopKRouter

HIDDEN, EXPERTS, TOP_K = 6, 5, 2


def hidden(tokens: int = 24, seed: int = 0) -> Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def router(counted: Counted | None = None, **settings) -> TopKRouter:
    torch.manual_seed(3)
    made = TopKRouter(HIDDEN, MoEConfig(experts=EXPERTS, top_k=TOP_K, **settings), std=1.0)
    made.counted = counted or made.counted
    return made


def losses(module: TopKRouter, x: Tensor, sequences: int = 1) -> Losses:
    return routing_losses(module, module(x), sequences)


def gradient(module: TopKRouter, *parts: Tensor, sequences: int = 1) -> Tensor:
    """Of the mean over microbatches."""
    module.weight.grad = None
    for x in parts:
        (sum(losses(module, x, sequences).values()) / len(parts)).backward()
    return module.weight.grad.clone()


def balance_by_hand(weight: Tensor, x: Tensor, sigmoid: bool = False) -> Tensor:
    logits = x @ weight.t()
    shares = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True) if sigmoid else logits.softmax(-1)
    chosen = logits.topk(TOP_K).indices.flatten()
    f = torch.stack([(chosen == e).float().mean() for e in range(EXPERTS)])
    return EXPERTS * (f * shares.mean(0)).sum()


@pytest.mark.parametrize("scope", ["microbatch", "global"])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_balance_is_the_coefficient_times_share_times_score(scores, scope):
    module = router(scores=scores, balance=0.02, balance_scope=scope)
    found = losses(module, hidden())["balance"]
    weight = module.weight.detach().clone().requires_grad_()
    expected = 0.02 * balance_by_hand(weight, hidden(), scores == "sigmoid")
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    torch.testing.assert_close(module.weight.grad, weight.grad)
    assert weight.grad.abs().max() > 1e-5


def test_balance_is_hugging_faces_divided_by_top_k():
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    module = router(balance=1.0)
    routed = module(hidden())
    theirs = mixtral.load_balancing_loss_func((routed.logits_NE,), EXPERTS, TOP_K)
    torch.testing.assert_close(routing_losses(module, routed)["balance"], theirs / TOP_K)


def test_balanced_choices_cost_the_coefficient():
    module = router(balance=0.3)
    with torch.no_grad():
        module.weight.zero_()
    x = hidden(10)
    routed = module(x)._replace(index_NK=torch.arange(20).view(10, 2) % EXPERTS)
    module.load.fill_(4)
    assert routing_losses(module, routed)["balance"].item() == pytest.approx(0.3)


def test_z_is_the_mean_square_of_the_log_sum_exp():
    module = router(z=0.1)
    found = losses(module, hidden())
    assert set(found) == {"z"}
    torch.testing.assert_close(found["z"], 0.1 * (hidden() @ module.weight.t()).exp().sum(-1).log().square().mean())


def test_of_sequences_it_is_the_mean_over_sequences():
    module = router(scores="sigmoid", balance=1.0, balance_scope="sequence")
    x = hidden(24)
    found = losses(module, x, sequences=3)["balance"]
    torch.testing.assert_close(
        found, torch.stack([balance_by_hand(module.weight, part, True) for part in x.split(8)]).mean()
    )
    whole = router(scores="sigmoid", balance=1.0, balance_scope="microbatch")
    assert (found - losses(whole, x)["balance"]).abs() > 1e-4


def test_of_sequences_shares_are_of_the_best_scores_whatever_a_bias_and_groups_choose():
    settings = {"scores": "sigmoid", "balance": 1.0, "balance_scope": "sequence", "bias_rate": 0.1}
    torch.manual_seed(3)
    module = TopKRouter(HIDDEN, MoEConfig(experts=6, top_k=TOP_K, groups=3, top_groups=1, **settings), std=1.0)
    module.expert_bias.copy_(torch.tensor([2.0, 2.0, 0.0, 0.0, -2.0, -2.0]))
    x = hidden(24)
    assert (module(x).index_NK < 2).all()
    scores_STE = (x @ module.weight.t()).sigmoid().view(3, 8, 6)
    best_STE = torch.zeros(3, 8, 6).scatter(-1, scores_STE.topk(TOP_K).indices, 1.0)
    # DeepSeek-V3, equations 17 to 20, alpha being 1.
    f_SE = best_STE.sum(1) * 6 / (TOP_K * 8)
    p_SE = (scores_STE / scores_STE.sum(-1, keepdim=True)).mean(1)
    found = losses(module, x, sequences=3)["balance"]
    torch.testing.assert_close(found, (f_SE * p_SE).sum(-1).mean())
    (of_weight,) = torch.autograd.grad((f_SE * p_SE).sum(-1).mean(), module.weight)
    torch.testing.assert_close(gradient(module, x, sequences=3), of_weight)


@pytest.mark.parametrize("scope", ["microbatch", "global", "sequence"])
def test_without_a_token_losses_and_gradients_are_zero(scope):
    module = router(balance=1.0, z=1.0, balance_scope=scope)
    found = losses(module, hidden(0))
    assert {name: loss.item() for name, loss in found.items()} == {"balance": 0.0, "z": 0.0}
    assert gradient(module, hidden(0)).equal(torch.zeros(EXPERTS, HIDDEN))
    module.counted = Padded(0)
    assert sum(losses(module, hidden(4)).values()).item() == 0.0
    assert gradient(module, hidden(4)).equal(torch.zeros(EXPERTS, HIDDEN))


class Padded(Counted):
    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def real(self, rows: int) -> Tensor:
        return torch.arange(rows) < self.tokens


@pytest.mark.parametrize("scope", ["microbatch", "global"])
def test_padding_changes_nothing(scope):
    settings = {"balance": 1.0, "z": 0.5, "balance_scope": scope}
    x = torch.cat((hidden(16), torch.full((8, HIDDEN), float("inf"))))
    padded, without = router(Padded(16), **settings), router(**settings)
    torch.testing.assert_close(losses(padded, x), losses(without, hidden(16)))
    padded.load.zero_()
    without.load.zero_()
    torch.testing.assert_close(gradient(padded, x), gradient(without, hidden(16)))


def test_the_difference_that_a_coefficient_makes_is_its_share_of_the_balance_gradient():
    """Traps 53: not cut from the graph, not scaled."""

    def trained(coefficient: float) -> Tensor:
        torch.manual_seed(0)
        block = MoE(HIDDEN, MoEConfig(experts=EXPERTS, top_k=TOP_K, intermediate_size=4, balance=coefficient), std=1.0)
        output = block(hidden().view(2, 12, HIDDEN))
        y, extra = output if coefficient else (output, {})
        (y.square().mean() + sum(extra.values())).backward()
        return block.gate.weight.grad

    torch.manual_seed(0)
    weight = MoE(HIDDEN, MoEConfig(experts=EXPERTS, top_k=TOP_K, intermediate_size=4), std=1.0).gate.weight
    (of_balance,) = torch.autograd.grad(balance_by_hand(weight, hidden()), weight)
    torch.testing.assert_close(trained(0.01) - trained(0.0), 0.01 * of_balance, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("scope", ["microbatch", "global", "sequence"])
def test_one_or_four_equal_microbatches_give_the_same_gradient(scope):
    """Traps 55: neither added once for each, nor divided twice."""
    settings = {"balance": 1.0, "z": 0.1, "balance_scope": scope}
    once, again = gradient(router(**settings), hidden()), gradient(router(**settings), *[hidden()] * 4)
    torch.testing.assert_close(again, once)
    together = gradient(router(**settings), torch.cat([hidden()] * 4), sequences=4)
    torch.testing.assert_close(together, once)


def test_shares_are_those_of_the_microbatches_so_far_and_start_anew_after_a_step():
    module, parts = router(balance=1.0), [hidden(seed=seed) for seed in range(3)]
    shares = [torch.bincount((x @ module.weight.t()).topk(TOP_K).indices.flatten(), minlength=EXPERTS) for x in parts]
    for step in range(2):
        so_far = torch.zeros(EXPERTS)
        for number, (x, share) in enumerate(zip(parts, shares, strict=True), start=1):
            so_far += share / share.sum()
            expected = EXPERTS * (so_far / number * (x @ module.weight.t()).softmax(-1).mean(0)).sum()
            torch.testing.assert_close(losses(module, x)["balance"], expected, msg=lambda m, s=step: f"step {s}: {m}")
        move_biases(module)


@pytest.mark.parametrize("nested", [False, True])
def test_a_reentrant_checkpoint_balances_by_the_shares_of_its_first_run(nested):
    """Several microbatches are under way, as in a pipeline: the choices so far are others when backward comes."""

    def trained(again: bool) -> Tensor:
        torch.manual_seed(0)
        block = MoE(HIDDEN, MoEConfig(experts=EXPERTS, top_k=TOP_K, intermediate_size=4, balance=1.0), std=1.0)

        def layer(x: Tensor) -> tuple[Tensor, Tensor]:
            y, found = block(x)
            return y, found["balance"]

        def inner(x: Tensor) -> tuple[Tensor, Tensor]:
            return checkpoint(layer, x, use_reentrant=True) if nested and again else layer(x)

        inputs = [hidden(seed=seed).view(2, 12, HIDDEN).requires_grad_() for seed in range(3)]
        found = [checkpoint(inner, x, use_reentrant=True) if again else inner(x) for x in inputs]
        for _, balance in found:
            balance.backward()
        return block.gate.weight.grad

    torch.testing.assert_close(trained(again=True), trained(again=False))


def test_validation_is_about_the_microbatch_and_asks_no_other_data_rank():
    class Asked(Counted):
        def sum(self, x, scope):
            raise AssertionError("a collective in validation, where ranks may have other numbers of batches")

    module = router(Asked(), balance=1.0).eval()
    with torch.no_grad():
        torch.testing.assert_close(losses(module, hidden())["balance"], balance_by_hand(module.weight, hidden()))
    assert module.load.sum() == 0


class Rank(Counted):
    """One of two ranks; what the other has is known beforehand."""

    def __init__(self, load: Tensor, sums: Tensor | None = None) -> None:
        self.load, self.sums = load, sums

    def sum(self, x, scope):
        assert scope == "global"
        return x + self.load

    def sum_of_microbatch(self, x):
        return x if self.sums is None else x + self.sums


def test_two_data_ranks_together_are_one_process_with_both_batches():
    parts = [hidden(seed=1), hidden(seed=2)]
    loads = [torch.bincount(router()(x).index_NK.flatten(), minlength=EXPERTS) for x in parts]
    settings = {"balance": 1.0, "z": 0.1}
    expected = router(**settings)
    value = losses(expected, torch.cat(parts))
    expected.load.zero_()
    ranks = [router(Rank(loads[1 - rank]), **settings) for rank in range(2)]
    found = [losses(module, x) for module, x in zip(ranks, parts, strict=True)]
    for name, loss in value.items():
        torch.testing.assert_close((found[0][name] + found[1][name]) / 2, loss)
    for module in ranks:
        module.load.zero_()
    mean = sum(gradient(module, x) for module, x in zip(ranks, parts, strict=True)) / 2
    torch.testing.assert_close(mean, gradient(expected, torch.cat(parts)))


def test_two_parts_of_a_microbatch_have_one_value_and_the_gradient_of_the_whole_between_them():
    class Noted(Counted):
        def sum_of_microbatch(self, x):
            self.sums = x.detach()
            return x

    settings = {"balance": 1.0, "z": 0.1, "balance_scope": "microbatch"}
    parts, sums = [hidden(10, seed=1), hidden(14, seed=2)], []
    for x in parts:
        noted = Noted()
        losses(router(noted, **settings), x)
        sums.append(noted.sums)
    nothing = torch.zeros(EXPERTS)
    ranks = [router(Rank(nothing, sums[1 - rank]), **settings) for rank in range(2)]
    whole = router(**settings)
    for module, x in zip(ranks, parts, strict=True):
        torch.testing.assert_close(losses(module, x), losses(whole, torch.cat(parts)))
    both = gradient(ranks[0], parts[0]) + gradient(ranks[1], parts[1])
    torch.testing.assert_close(both, gradient(whole, torch.cat(parts)))

"""Hugging Face's models of experts, as they come: what is recognised, what experts compute, and parity of two ranks with one process."""

import copy
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("transformers")

from lightning_5d.expert_parallel.counted import Counted, Scope
from lightning_5d.expert_parallel.dispatch import through_experts
from lightning_5d.expert_parallel.exchange import TokenExchange, open_exchange
from lightning_5d.expert_parallel.found import FoundExperts
from lightning_5d.expert_parallel.router_losses import RouterLosses
from lightning_5d.expert_parallel.survey import found_experts, near_misses
from lightning_5d.replaced_forward import ReplacedForward
from tests.expert_parallel.hugging_face_models import BALANCED, MODELS, SMALL, model
from tests.ranks.pool import RankPool

STEPS, ROWS, TOKENS = 3, 4, 8


CONFIG: dict[str, Any] = {
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["hidden_size", "moe_hidden_size"], 16),
    **dict.fromkeys(["intermediate_size", "moe_intermediate_size"], 12),
    **dict.fromkeys(["mlp_gate_softcap", "mlp_up_softcap"], 5.0),
    "hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "moe_latent_size": None,
    "post_norm_eps": 1e-6,
    "swiglu_limit": 0.3,
    "swiglu_alpha": 1.702,
}
CLASSES = {
    "MixtralExperts": "mixtral",
    "GptOssExperts": "gpt_oss",  # biases, transposed, interleaved, clamped
    "OpenAIPrivacyFilterExperts": "openai_privacy_filter",  # biases, transposed
    "AriaExperts": "aria",  # transposed
    "NemotronHExperts": "nemotron_h",  # without a gate
    "DeepseekV4Experts": "deepseek_v4",  # clamped
    "BeamExperts": "beam",  # a gate in fp32
    "Inkling2Experts": "inkling2",  # an activation of two
    "Step3p7Experts": "step3p7",  # without transformers' decorator: its own forward computes
}
"""Each class of another kind; those of all other models have the code of one of these."""


def experts(kind: str, implementation: str = "eager") -> nn.Module:
    """A layer's experts without a model."""
    made = getattr(import_module(f"transformers.models.{CLASSES[kind]}.modeling_{CLASSES[kind]}"), kind)
    generator = torch.Generator().manual_seed(0)
    module: nn.Module = made(SimpleNamespace(**CONFIG, _experts_implementation=implementation))
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0, 0.4, generator=generator)
    return module


def choices(tokens: int, count: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, of which none goes to the last expert."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(tokens, 16, generator=generator)
    index = torch.rand(tokens, count - 1, generator=generator).argsort(1)[:, :2]
    return hidden.requires_grad_(), index, torch.rand(tokens, 2, generator=generator).requires_grad_()


def found(module: nn.Module) -> FoundExperts:
    """The only experts of a module."""
    holder = nn.ModuleDict({"experts": module})
    assert not near_misses(holder)
    (only,) = found_experts(holder)
    return only


@pytest.mark.parametrize("kind", CLASSES)
def test_rows_sorted_by_expert_become_what_the_module_makes_of_them(kind: str) -> None:
    module = experts(kind)
    compute = partial(found(module).compute, module)
    for tokens in (9, 0):
        hidden, index, weights = choices(tokens)
        wanted = [hidden, weights, *module.parameters()]
        out = through_experts(hidden, index, weights, 4, compute)
        gradients = torch.autograd.grad(out.square().sum(), wanted)
        if not tokens:
            assert not any(gradient.any() for gradient in gradients)
            break
        expected = module(hidden, index, weights)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        for mine, theirs in zip(gradients, torch.autograd.grad(expected.square().sum(), wanted), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["MixtralExperts", "AriaExperts", "NemotronHExperts"])
def test_parts_of_experts_add_up_to_whole_ones(kind: str) -> None:
    module = experts(kind)
    known = found(module)
    rows, counts = torch.randn(8, 16, generator=torch.Generator().manual_seed(3)), torch.tensor([3, 0, 4, 1])
    whole = known.compute(module, rows, counts)
    total = torch.zeros_like(whole)
    for part in range(2):
        cut = copy.deepcopy(module)
        for key, dim in known.tensor_dims.items():
            weight = getattr(module, key).detach()
            pieces = weight.chunk(2, dim) if key in known.halves else (weight,)
            setattr(cut, key, nn.Parameter(torch.cat([piece.chunk(2, dim)[part] for piece in pieces], dim)))
        total += known.compute(cut, rows, counts)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-5)
    assert set(known.tensor_dims) == set(known.stacked)


def test_experts_with_biases_are_not_cut() -> None:
    assert not found(experts("GptOssExperts")).tensor_dims


def test_how_many_experts_a_token_goes_to_is_read_off_the_layer() -> None:
    for kind, settings in MODELS.items():
        layers = found_experts(model(kind))
        assert layers, kind
        for layer in layers:
            assert (layer.count, layer.top_k) == (4, 1 if kind == "Zaya" else 2), (kind, settings)


@pytest.mark.parametrize(
    ("kind", "config", "words"),
    [
        ("Llama4ForCausalLM", "Llama4TextConfig", ["Llama4TextExperts", "is called with (hidden_states)"]),
        ("JetMoeForCausalLM", "JetMoeConfig", ["JetMoeParallelExperts", "is called with (inputs, expert_size)"]),
        (
            "LongcatFlashForCausalLM",
            "LongcatFlashConfig",
            ["LongcatFlashExperts", "first dimensions", "gate_up_proj (768"],
        ),
        ("NllbMoeForConditionalGeneration", "NllbMoeConfig", ["NllbMoeExperts", "is a ModuleDict of 128 modules"]),
        ("SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig", ["is a ModuleDict of 8 modules"]),
    ],
)
def test_models_whose_experts_cannot_be_spread_say_why(kind: str, config: str, words: list[str]) -> None:
    import transformers

    with torch.device("meta"):
        module = getattr(transformers, kind)(getattr(transformers, config)(**SMALL))
    assert not found_experts(module)
    problems = [str(problem) for problem in near_misses(module)]
    assert any(all(word in problem for word in words) for problem in problems), problems
    assert all("stacked weights" in problem for problem in problems)


def test_a_weight_that_all_experts_share_is_refused_by_name() -> None:
    module = import_module("transformers.models.muse_spark.modeling_muse_spark").MuseSparkExperts(
        SimpleNamespace(**CONFIG)
    )
    (problem,) = near_misses(nn.ModuleDict({"experts": module}))
    assert "has post_expert_norm.weight, which all of its experts share" in str(problem)


class Mine(nn.Module):
    """Experts of somebody who has read how others do it."""

    def __init__(self, count: int = 4, normed: bool = False) -> None:
        super().__init__()
        self.num_experts, self.normed = count, normed
        generator = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(torch.randn(count, 16, 12, generator=generator))
        self.down = nn.Parameter(torch.randn(count, 12, 16, generator=generator))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        scale = self.up.norm() if self.normed else 1.0
        for expert in range(self.num_experts):
            token, place = torch.where(chosen == expert)
            y = (x[token] @ self.up[expert] / scale).relu() @ self.down[expert]
            out = out.index_add(0, token, y * weights[token, place, None])
        return out


class Attention(Mine):
    """Three tensors, and weights by head."""

    num_experts = 4


class Sorted(Mine):
    """Computes sorted rows itself, and is called something else."""

    def compute_sorted(self, rows: Tensor, counts: Tensor) -> Tensor:
        parts = rows.split(counts.tolist())
        return torch.cat([(part @ up).relu() @ down for part, up, down in zip(parts, self.up, self.down, strict=True)])


def test_experts_of_anybodys_are_recognised_by_name_and_computed_by_their_own_forward() -> None:
    module = Mine()
    layer = found(module)
    assert layer.stacked == ("up", "down")
    hidden, index, weights = choices(9)
    out = through_experts(hidden, index, weights, 4, partial(layer.compute, module))
    torch.testing.assert_close(out, module(hidden, index, weights), rtol=1e-5, atol=1e-5)
    assert module.num_experts == 4
    assert not found_experts(nn.ModuleDict({"attention": Attention()}))
    assert not near_misses(nn.ModuleDict({"attention": Attention()}))


def test_a_method_for_sorted_rows_makes_experts_of_a_module_of_any_name() -> None:
    module = Sorted()
    (layer,) = found_experts(nn.ModuleDict({"ffn": module}))
    hidden, index, weights = choices(9)
    out = through_experts(hidden, index, weights, 4, partial(layer.compute, module))
    torch.testing.assert_close(out, module(hidden, index, weights), rtol=1e-5, atol=1e-5)


def test_experts_whose_forward_needs_all_of_them_are_refused() -> None:
    (problem,) = near_misses(nn.ModuleDict({"experts": Mine(normed=True)}))
    assert "with half of its 4 experts its forward computes other values" in str(problem)
    assert "forward(hidden, index, weights)" in str(
        problem
    )  # the other way round it also runs, and computes other values
    assert "compute_sorted(rows, counts)" in str(problem)


def test_a_list_of_modules_is_refused_and_experts_of_a_router_of_tasks_are_not_meant() -> None:
    layer = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))})
    (problem,) = near_misses(layer)
    assert "The experts experts (ModuleList) cannot be spread over ranks: it is a ModuleList of 3 modules." in str(
        problem
    )
    assert not near_misses(nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))}))


class Spread(ReplacedForward):
    """The least that an axis does: tokens go to where their experts are."""

    def __init__(self, found: FoundExperts, exchange: TokenExchange) -> None:
        super().__init__(found.module)
        self.found, self.exchange = found, exchange
        for key in found.stacked:
            whole = getattr(found.module, key)
            setattr(found.module, key, nn.Parameter(whole.detach().chunk(exchange.size)[exchange.rank].clone()))
        found.module.forward = self

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        compute = partial(self.found.compute, self.module)
        return through_experts(hidden, index, weights, self.found.count, compute, self.exchange)


class OverData(Counted):
    """Each rank has other rows of the batch."""

    def sum(self, x: Tensor, scope: Scope) -> Tensor:
        total = x.detach().clone()
        if scope == "global":
            dist.all_reduce(total)
        return total


def steps(module: nn.Module, rows: slice, losses: RouterLosses | None = None) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Losses and gradients of some steps of SGD; with `losses` over the ranks, which have different rows."""
    ids = torch.randint(3, 61, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))[rows]
    stacked = [f"{layer.name}.{key}" for layer in found_experts(module) for key in layer.stacked]
    taken = []
    for _ in range(STEPS):
        module.zero_grad()
        if losses is None:
            loss = module(input_ids=ids, labels=ids).loss
        else:
            with losses.step():
                loss = module(input_ids=ids, labels=ids).loss
        loss.backward()
        loss = loss.detach()
        gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        if losses is not None:
            for value in [loss, *(gradient for name, gradient in gradients.items() if name not in stacked)]:
                dist.all_reduce(value)
            for value in [loss, *gradients.values()]:
                value /= dist.get_world_size()
        taken.append((loss, {name: gradient.clone() for name, gradient in gradients.items()}))
        with torch.no_grad():
            for name, gradient in gradients.items():
                module.get_parameter(name).sub_(gradient, alpha=0.5)
    return taken


def _two_ranks(rank: int) -> dict[str, float]:
    """Each model on two ranks, and on the whole batch in one process: the largest relative difference."""
    exchange = open_exchange(dist.group.WORLD)  # type: ignore[arg-type]
    differences = {}
    for kind in MODELS:
        module = model(kind, **BALANCED)
        for layer in found_experts(module):
            Spread(layer, exchange)
        half = ROWS // 2
        taken = steps(module, slice(rank * half, (rank + 1) * half), RouterLosses(module, OverData()))
        expected = steps(model(kind, **BALANCED), slice(None))
        differences[kind] = max(
            _difference(*pair, rank, step) for step, pair in enumerate(zip(taken, expected, strict=True))
        )
    exchange.close()
    return differences


def _difference(
    found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]], rank: int, step: int
) -> float:
    (loss, gradients), (whole_loss, whole) = found, expected
    assert set(whole) <= set(gradients)
    assert not any(gradients[name].any() for name in set(gradients) - set(whole))
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
    worst = abs(float(loss / whole_loss) - 1)
    if step == STEPS - 1:
        # Weights have rounding of two large steps in them by then: small gradients of norms differ by up to 2e-4, from fp64 as well.
        return worst
    for name, wanted in whole.items():
        mine = wanted if gradients[name].shape == wanted.shape else wanted.chunk(2)[rank]
        worst = max(worst, float((gradients[name] - mine).abs().max() / wanted.abs().max().clamp(min=1e-6)))
    return worst


def test_models_on_two_ranks_train_as_in_one_process(ranks: RankPool) -> None:
    for differences in ranks(2, _two_ranks, timeout=60.0):
        assert list(differences) == list(MODELS)
        assert max(differences.values()) < 1e-5, differences

"""Balance losses that Hugging Face's models add to theirs are over the tokens of all ranks, and nothing of that is seen outside of steps."""

import copy
import pickle
import threading
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from lightning_5d import ContextParallel, ExpertParallel, FiveD, PipelineParallel
from lightning_5d.expert_parallel.counted import Counted, Scope
from lightning_5d.expert_parallel.router_losses import RouterLosses, balance_loss
from tests.context_parallel.test_hugging_face import Sentences
from tests.expert_parallel.hugging_face_models import BALANCED, SMALL, model
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, Dealt, apart, fit
from tests.tensor_parallel.test_hugging_face import Labelled


def function_of(module: nn.Module) -> Any:
    """The balance loss that a model's code finds."""
    return import_module(type(module).__module__).load_balancing_loss_func


class Asked(Counted):
    """Keeps what it was asked for."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []

    def sum(self, x: Tensor, scope: Scope) -> Tensor:
        self.scopes.append(scope)
        return x


class Real(Counted):
    """The last rows are padding."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def real(self, rows: int) -> Tensor:
        return torch.arange(rows) < self.rows


def test_a_balance_loss_in_one_process_is_the_models_own() -> None:
    logits = tuple(torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    theirs = function_of(model("Mixtral"))
    for given in (None, mask):
        expected = theirs(logits, 4, 2, given)
        torch.testing.assert_close(balance_loss(logits, 2, given, Counted()), expected)
        torch.testing.assert_close(balance_loss(logits, 2, given, Real(99)), expected)
    torch.testing.assert_close(balance_loss(logits, 2, None, Real(4)), theirs(logits, 4, 2, mask))
    unreal = Real(3)
    torch.testing.assert_close(balance_loss(logits, 2, mask, unreal), theirs(tuple(x[:3] for x in logits), 4, 2))


def test_the_replaced_loss_is_seen_in_steps_of_the_model_alone() -> None:
    module, other = model("Mixtral", **BALANCED), model("Mixtral", **BALANCED)
    original, counted = function_of(module), Asked()
    seen: list[Any] = []
    losses = RouterLosses(module, counted)
    assert (losses.models, losses.unknown) == (["MixtralForCausalLM"], [])
    pickled = pickle.loads(pickle.dumps(module))
    module.model.register_forward_hook(lambda *_: seen.append(function_of(module)))
    ids = torch.arange(3, 11)[None]

    def loss(one: nn.Module) -> float:
        return float(one(input_ids=ids, labels=ids).aux_loss.detach())

    alone = loss(other)
    assert loss(module) == alone  # outside of a step
    assert seen.pop() is original
    with losses.step():
        assert loss(module) == pytest.approx(alone)
        assert counted.scopes == ["global", "microbatch"]
        replaced = seen.pop()
        assert replaced is not original
        assert function_of(module) is original
        assert loss(other) == alone
        for copied in (copy.deepcopy(module), pickled):
            assert loss(copied) == alone
    elsewhere: list[Any] = []
    thread = threading.Thread(target=lambda: elsewhere.append(replaced((torch.ones(2, 4),), 4, 2)))
    thread.start()
    thread.join(10)
    assert elsewhere == [original((torch.ones(2, 4),), 4, 2)]
    assert len(counted.scopes) == 2
    losses.close()
    assert "forward" not in vars(module)
    with losses.step():
        assert loss(module) == alone


def test_a_failed_forward_leaves_the_models_own_loss_in_place() -> None:
    module = model("Mixtral", **BALANCED)
    original, losses = function_of(module), RouterLosses(module, Counted())
    with losses.step(), pytest.raises(IndexError):
        module(input_ids=torch.tensor([[999]]))
    assert function_of(module) is original


def test_another_formula_is_left_alone_and_named() -> None:
    import transformers

    with torch.device("meta"):
        settings = {**SMALL, "vocab_size": 9, "d_model": 8, "num_layers": 2, "num_heads": 2, "num_experts": 2}
        module = transformers.SwitchTransformersForConditionalGeneration(
            transformers.SwitchTransformersConfig(**settings)
        )
    losses = RouterLosses(module, Counted())
    assert (losses.models, losses.unknown) == ([], ["SwitchTransformersForConditionalGeneration"])
    assert "forward" not in vars(module)


RUNS: dict[str, Any] = {"plain": 11, "right": 12}
"""Rows without padding, of a length that two ranks do not divide, and padded ones."""
PLUGINS: dict[str, tuple[Any, ...]] = {
    "data": (ExpertParallel(2),),
    "context": (ContextParallel(2), ExpertParallel(2)),
    "stages": (PipelineParallel(2, microbatches=1), ExpertParallel(2)),
}


def _sentences(kind: str) -> Dealt:
    return Dealt(Sentences(kind, tokens=RUNS[kind]), 4)


def _fit_each(rank: int, kinds: list[str], strategy: Any, **arguments: Any) -> list[Any]:
    module = partial(Labelled, "Mixtral", **BALANCED)
    return [fit(rank, module, partial(_sentences, kind), strategy, **arguments) for kind in kinds]


@pytest.mark.parametrize("plugins", PLUGINS)
def test_a_models_own_balance_loss_is_that_of_one_process(ranks: RankPool, plugins: str) -> None:
    # On data ranks a loss is the mean of their means: of as many tokens each, if it is to be that of one process.
    kinds = list(RUNS) if plugins == "context" else ["plain"]
    world = 4 if plugins == "stages" else 2
    arguments: Mapping[str, Any] = {"gradient_clip_val": 0.5, "limit_val_batches": 2}
    strategy = partial(FiveD, *PLUGINS[plugins])
    found = ranks(world, partial(_fit_each, kinds=kinds, strategy=strategy, devices=world, **arguments), **SEPARATE)
    for index, expected in enumerate(_fit_each(0, kinds, None, **arguments)):
        differences = apart([each[index] for each in found], expected, 1e-6)
        assert max(differences.values()) < 1e-5, (kinds[index], differences)
        losses = [each[index]["metrics"]["loss"] for each in found]
        assert sum(losses) / world == pytest.approx(expected["metrics"]["loss"], rel=1e-5)

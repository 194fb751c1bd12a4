"""What would train to wrong numbers, or fail in words of torch's, is refused before training in words of ours."""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn

from lightning_5d.data_parallel.compatibility import module_problems, sharded_optimizer_problems
from tests.modules import TinyLM, loader
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.trainers import zero

TRAINER = {"backend": None, "timeout": 50.0}


def _matrix() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2, 2))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.Muon, "Muon orthogonalizes whole matrices, and ZeRO stage 2 spreads them"),
        (torch.optim.Adafactor, "Adafactor takes means over rows and columns"),
        (torch.optim.Rprop, "Rprop writes to gradients by a mask"),
        (torch.optim.LBFGS, "LBFGS works on all gradients as one vector"),
        (partial(torch.optim.SGD, fused=True), r"SGD\(fused=True\) has no kernel for sharded tensors"),
        (partial(torch.optim.Adagrad, fused=True), r"Adagrad\(fused=True\) has no kernel for sharded tensors"),
    ],
)
def test_an_optimizer_that_cannot_work_on_shards_is_named_with_the_reason(make: Any, words: str) -> None:
    (problem,) = sharded_optimizer_problems([make([_matrix()])], stage=2)
    with pytest.raises(ValueError, match=words):
        raise ValueError(str(problem))
    assert "ZeRO(stage=0)" in problem.fix


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "NAdam", "RAdam", "RMSprop", "ASGD", "Adamax"])
def test_optimizers_that_work_element_by_element_are_accepted(name: str) -> None:
    assert sharded_optimizer_problems([getattr(torch.optim, name)([_matrix()])], stage=3) == []


class OwnMuon(torch.optim.Muon):
    """A user's subclass."""


def test_a_subclass_is_what_its_base_is() -> None:
    assert len(sharded_optimizer_problems([OwnMuon([_matrix()])], stage=1)) == 1


def _with(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (_with(embed=nn.Embedding(3, 2, sparse=True)), "embed makes sparse gradients"),
        (_with(bag=nn.EmbeddingBag(3, 2, max_norm=1.0)), "bag has max_norm=1.0"),
        (_with(lazy=nn.LazyLinear(2)), "lazy modules have no shape yet: lazy.weight, lazy.bias"),
    ],
)
def test_a_layer_that_ranks_would_change_apart_is_named(module: nn.Module, words: str) -> None:
    (problem,) = module_problems(module, stage=0, ranks=2)
    assert words in str(problem)


def test_one_rank_may_have_sparse_gradients_and_limited_norms() -> None:
    assert module_problems(_with(embed=nn.Embedding(3, 2, sparse=True, max_norm=1.0)), stage=1, ranks=1) == []


def test_hooks_that_sharding_would_lose_are_named() -> None:
    module = nn.Linear(2, 2)
    module.weight.register_hook(lambda grad: grad * 2)
    module.bias.register_post_accumulate_grad_hook(lambda parameter: None)  # type: ignore[no-untyped-call]
    (problem,) = module_problems(module, stage=1, ranks=2)
    assert "stage 1 shards them: weight, bias" in str(problem)
    assert module_problems(module, stage=0, ranks=2) == []
    (problem,) = module_problems(module, stage=0, ranks=1, cast=True)
    assert "mixed precision puts copies in their place" in problem.what
    assert "autocast=True" in problem.fix


@pytest.mark.parametrize("callback", [WeightAveraging(), StochasticWeightAveraging(swa_lrs=0.1)])
def test_callbacks_that_average_whole_weights_are_named(callback: Any) -> None:
    (problem,) = module_problems(nn.Linear(2, 2), stage=1, ranks=2, callbacks=[callback])
    assert f"{type(callback).__name__} averages whole parameters" in str(problem)
    assert module_problems(nn.Linear(2, 2), stage=0, ranks=2, callbacks=[callback]) == []


class Orthogonal(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8, max_norm=1.0)
        self.head.weight.register_hook(_double)


def _double(grad: Tensor) -> Tensor:
    return grad * 2


def _fit(rank: int) -> None:
    zero(1, 2, callbacks=[WeightAveraging()]).fit(Orthogonal(), loader(8))


def test_a_run_shows_all_of_them_at_once(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="3 settings do not work") as caught:
        ranks(2, _fit, **TRAINER)
    for words in ("embed has max_norm", "head.weight", "WeightAveraging averages"):
        assert words in str(caught.value)

"""A user's own backward in a step or a hook: the numbers of one process under every way of spreading data, or one clear error."""

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_5d.own_backwards import _reaches
from tests.modules import TinyLM, Tokens
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.strategy.own_backwards import KINDS, Attacked
from tests.strategy.test_trainer import Data
from tests.trainers import plain, quiet, whole, zero

TRAINER = {"backend": None, "timeout": 50.0}
LAYOUTS = [(0, 2, 1), (1, 2, 1), (2, 2, 1), (3, 2, 1)]
BY_HAND = {name for name, kind in KINDS.items() if issubclass(kind, KINDS["ByHand"])}


def _train(rank: int, names: list[str], layout: tuple[int, int, int] | None, arguments: dict[str, Any]) -> Any:
    return {name: _trained(KINDS[name](), layout, arguments) for name in names}


def _trained(module: Attacked, layout: tuple[int, int, int] | None, arguments: dict[str, Any]) -> dict[str, Any]:
    arguments = {"max_epochs": 1, "inference_mode": False, **arguments}
    trainer = quiet(**arguments) if layout is None else zero(*layout, **arguments)
    trainer.fit(module, Data(count=48, global_batch=12, val=24))
    metrics = plain(
        {name: value for name, value in trainer.callback_metrics.items() if name.endswith(("epoch", "val_loss"))}
    )
    return {"weights": whole(module), "found": module.found, "metrics": metrics, "steps": trainer.global_step}


@functools.cache
def _alone(pool: RankPool, name: str, arguments: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """What one process finds, once for all layouts."""
    found: dict[str, Any] = pool(1, _train, [name], None, dict(arguments), **TRAINER, env={"WORLD_SIZE": None})[0][name]
    return found


def _same(pool: RankPool, names: list[str], layout: tuple[int, int, int], **arguments: Any) -> None:
    one = {name: _alone(pool, name, tuple(arguments.items())) for name in names}
    for found in pool(layout[1], _train, names, layout, arguments, **TRAINER):
        for name, expected in one.items():
            assert expected["steps"] >= 2
            for key in ("weights", "metrics", "found", "steps"):
                torch.testing.assert_close(
                    found[name][key], expected[key], rtol=1e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
                )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_backward_of_ones_own_leaves_the_numbers_of_one_process(
    ranks: RankPool, layout: tuple[int, int, int]
) -> None:
    _same(ranks, sorted(KINDS), layout)


# Stages 0 and 1 take the kinds in turn: what a backward waits for is the same as without replicas, where they have all.
@pytest.mark.parametrize(
    ("layout", "kinds"), [((0, 4, 2), slice(0, None, 2)), ((1, 4, 2), slice(1, None, 2)), ((3, 4, 2), slice(None))]
)
def test_the_same_over_replicas(ranks: RankPool, layout: tuple[int, int, int], kinds: slice) -> None:
    _same(ranks, sorted(KINDS)[kinds], layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_within_windows(ranks: RankPool, layout: tuple[int, int, int]) -> None:
    _same(ranks, sorted(set(KINDS) - BY_HAND), layout, accumulate_grad_batches=2)


class Weighted(Attacked):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "weight": float(batch_idx + 1)}


class WithGraph(Attacked):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        loss.backward(create_graph=True)
        return loss


class Predicting(Attacked):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.enable_grad():
            return self.attack(batch)


def _fit(rank: int, kind: type[Attacked], stage: int, arguments: dict[str, Any]) -> None:
    zero(stage, 2, **arguments).fit(kind(), Data(count=48, global_batch=12))


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (Weighted, {"accumulate_grad_batches": 2}, "accumulation window with weights"),
        (Attacked, {"accumulate_grad_batches": 3, "limit_train_batches": 2}, "window with 2 of 3 microbatches"),
        (WithGraph, {}, r"calls `backward\(create_graph=True\)` by itself"),
    ],
)
def test_what_cannot_be_right_is_refused(
    ranks: RankPool, kind: type[Attacked], arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(RankError, match=words):
        ranks(2, _fit, kind, 1, arguments, **TRAINER)


def _last_of_one(rank: int) -> int:
    trainer = zero(1, 2, accumulate_grad_batches=3)
    trainer.fit(Attacked(), Data(count=48, global_batch=12))
    return trainer.global_step


def test_a_window_of_one_microbatch_has_nothing_of_the_users_own_in_it(ranks: RankPool) -> None:
    assert ranks(2, _last_of_one, **TRAINER) == [2, 2]


def _predict_unevenly(rank: int) -> None:
    trainer = zero(1, 2, inference_mode=False)
    data = torch.utils.data.DataLoader(torch.arange(7 * 5).remainder(13).view(5, 7), batch_size=1)  # type: ignore[arg-type]
    trainer.predict(Predicting(), data)


def test_prediction_of_different_numbers_of_batches_has_no_backward_of_weights(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="different numbers of batches to predict"):
        ranks(2, _predict_unevenly, **TRAINER)


class Probed(TinyLM):
    """One rank trains something else beside the module."""

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if self.global_rank == 0:
            probe = nn.Linear(8, 1)
            probe(self.full[batch[:, 0]]).square().mean().backward()
            assert probe.weight.grad is not None

    def on_train_start(self) -> None:
        self.full = torch.randn(13, 8)


def _probe(rank: int, stage: int) -> int:
    trainer = zero(stage, 2)
    trainer.fit(Probed(), Data())
    return trainer.global_step


@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_of_another_module_on_one_rank_waits_for_nobody(ranks: RankPool, stage: int) -> None:
    assert ranks(2, _probe, stage, **TRAINER) == [4, 4]


class Asking(Attacked):
    """Asks for gradients of weights without leaving them in `grad`."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.found = list(torch.autograd.grad(loss, [self.head.weight, self.layers[0].up.weight], retain_graph=True))
        return loss


def _ask(rank: int, stage: int) -> tuple[list[Tensor], list[Tensor], int]:
    module = Asking()
    batch = Tokens(16).rows[rank:4:2]
    loss = module.loss(batch)
    expected = list(torch.autograd.grad(loss, [module.head.weight, module.layers[0].up.weight]))  # type: ignore[list-item]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zero(stage, 2, limit_train_batches=1).fit(module, Data())
    return (
        module.found,
        expected,
        sum("from this rank's part of the batch alone" in str(each.message) for each in caught),
    )


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_of_weights_that_are_asked_for_are_the_ranks_own_which_is_said_once(
    ranks: RankPool, stage: int
) -> None:
    for rank, (found, expected, said) in enumerate(ranks(2, _ask, stage, **TRAINER)):
        torch.testing.assert_close(found, expected)
        assert said == (rank == 0)


def test_gradients_of_shards_cannot_be_asked_for(ranks: RankPool) -> None:
    with pytest.raises(
        RankError, match=r"gradient of layers\.0\.up\.weight is asked for, and the module holds a shard"
    ):
        ranks(2, _ask, 3, **TRAINER)


def test_only_what_reaches_weights_is_taken_for_a_backward_of_the_module() -> None:
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    assert _reaches([(weight * other).sum()], {id(weight)})
    assert _reaches([other.sum(), (weight * 2).exp()], {id(weight)})
    assert _reaches([weight], {id(weight)})
    assert not _reaches([(other * 2).sum(), torch.ones(2)], {id(weight)})
    assert not _reaches([(other * weight.detach()).sum()], {id(weight)})

"""What people do to models before they train them, and to losses: all of it with cut sequences as in one process."""

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest

pytest.importorskip("transformers")

from lightning_5d import ContextParallel, FiveD, Parallelism, ZeRO
from tests.context_parallel.adapted import (
    ComputedAgain,
    ComputedAgainReentrant,
    PenalizedInside,
    dropping,
    learned_positions,
    masked,
    penalized,
    shifted_by_hand,
)
from tests.context_parallel.layers_on_a_module import with_attention
from tests.context_parallel.test_hugging_face import sentences
from tests.context_parallel.test_training import METHODS, uneven
from tests.modules import TinyLM, Tokens
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, Dealt, Rows, apart, fit
from tests.tensor_parallel.test_adapted import adapt, by_hand, changed, compile_blocks, freeze


def tokens() -> Dealt:
    return Dealt(Tokens(12), 4)


def even(rows: int = 16) -> Dealt:
    return Dealt(Rows(rows, 11), 4)


RUNS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "layers on the module": (partial(with_attention, TinyLM), tokens),
    "blocks computed again": (partial(with_attention, ComputedAgain), tokens),
    "blocks computed again, reentrant": (partial(with_attention, ComputedAgainReentrant), tokens),
    "labels shifted by hand, right": (shifted_by_hand, partial(sentences, "right")),
    "labels shifted by hand, left": (shifted_by_hand, partial(sentences, "left")),
    "BERT": (masked, partial(sentences, "right")),
    "GPT-2": (learned_positions, partial(sentences, "plain")),
    "GPT-2 computed again": (partial(learned_positions, checkpointing=True), partial(sentences, "plain")),
    "adapters": (partial(changed, adapt), even),
    "frozen blocks": (partial(changed, freeze), even),
    "gradients of gradients": (penalized, uneven),
}
SLOW: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "compiled blocks": (partial(changed, compile_blocks, layers=1), partial(even, rows=8)),
}
BY_HAND: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {"two optimizers by hand": (by_hand, even)}
# In double precision gradients that are zero but for rounding do not stand out; numbers of evaluation are not compared.
EXACT: Mapping[str, Any] = {"precision": "64-true", "limit_val_batches": 1}


def _fit_each(rank: int, runs: Sequence[tuple[Any, Any]], strategy: Any, **arguments: Any) -> list[Any]:
    """Several runs in one call of the pool: most of a short run's time is its start."""
    return [fit(rank, module, data, strategy, **arguments) for module, data in runs]


@functools.cache
def _alone(module: Callable[[], Any], data: Callable[[], Any], **arguments: Any) -> Any:
    """One process, once for all that is compared with it."""
    return fit(0, module, data, None, **EXACT, **arguments)


def _compare(
    ranks: RankPool, runs: dict[str, tuple[Any, Any]], *plugins: Parallelism, world: int, **arguments: Any
) -> None:
    call = partial(_fit_each, runs=[*runs.values()], **EXACT, **arguments)
    found = ranks(world, partial(call, strategy=partial(FiveD, *plugins), devices=world), **SEPARATE)
    for index, (name, (module, data)) in enumerate(runs.items()):
        differences = apart([each[index] for each in found], _alone(module, data, **arguments), 1e-6)
        # The library computes its losses in single precision.
        assert differences.pop("losses") < 1e-6, name
        assert max(differences.values()) < 1e-9, (name, differences)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("method", ["ring zigzag", "ulysses"])
def test_adapted_models_train_as_in_one_process(ranks: RankPool, method: str) -> None:
    _compare(ranks, RUNS, ContextParallel(2, **METHODS[method]), world=2, gradient_clip_val=0.5)


@pytest.mark.timeout(400)
def test_adapted_models_are_sharded(ranks: RankPool) -> None:
    names = ["layers on the module", "blocks computed again", "adapters", "frozen blocks", "GPT-2 computed again"]
    runs = {name: RUNS[name] for name in names}
    _compare(ranks, runs, ContextParallel(2), ZeRO(stage=3), world=4, gradient_clip_val=0.5)


@pytest.mark.timeout(400)
def test_compiled_blocks_train_as_in_one_process(ranks: RankPool) -> None:
    _compare(ranks, SLOW, ContextParallel(2), world=2, gradient_clip_val=0.5)


def test_two_optimizers_stepped_by_hand(ranks: RankPool) -> None:
    _compare(ranks, BY_HAND, ContextParallel(2), ZeRO(stage=1), world=4)


def _losses(rank: int, rates: dict[str, float]) -> list[float]:
    strategy = partial(FiveD, ContextParallel(2))
    data = partial(sentences, "right")
    run = fit(rank, partial(dropping, **rates), data, strategy, devices=2, max_epochs=8, limit_val_batches=0)
    losses: list[float] = run["losses"]
    return losses


def test_dropout_of_features_trains(ranks: RankPool) -> None:
    found = ranks(2, _losses, {}, **SEPARATE)
    assert found[0] == found[1]
    assert sum(found[0][-3:]) < 0.8 * sum(found[0][:3])
    plain = fit(0, masked, partial(sentences, "right"), None)["losses"]
    assert abs(found[0][0] - plain[0]) > 1e-3, "features are dropped"


def test_dropout_of_attention_is_refused_with_words(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="attention_probs_dropout_prob"):
        ranks(2, _losses, {"attention_probs_dropout_prob": 0.1}, **SEPARATE)


def _twice(rank: int) -> None:
    fit(rank, partial(penalized, PenalizedInside), uneven, partial(FiveD, ContextParallel(2)), devices=2)


def test_gradients_of_gradients_through_attention_are_refused(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="differentiate twice"):
        ranks(2, _twice, **SEPARATE)

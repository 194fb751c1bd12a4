"""A tensor axis that cannot work is refused: before anything is started where numbers are known, else before training."""

from functools import partial

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_5d import FiveD, Parallelism, ParallelPlan, TensorParallel, ZeRO
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, Dealt, Rows, decoder, fit
from tests.trainers import quiet


@pytest.mark.parametrize(
    ("plugin", "devices", "words"),
    [
        (TensorParallel(0), 2, ["The size of axis 'tp' is 0", "at least 1"]),
        (TensorParallel(2.0), 2, ["size=2.0", "whole number"]),  # type: ignore[arg-type]
        (TensorParallel(4), 6, ["6 ranks cannot be divided by tp=4", "3 works with 6 ranks", "8 ranks"]),
        (TensorParallel(1, sequence_parallel=True), 1, ["sequence_parallel=True", "at least 2"]),
        (TensorParallel(2, sequence_parallel="yes"), 2, ["sequence_parallel='yes'"]),  # type: ignore[arg-type]
        (TensorParallel(2, plan=["layers.*"]), 2, ["no mapping of patterns", "colwise"]),  # type: ignore[arg-type]
    ],
)
def test_wrong_settings_are_refused_when_the_trainer_is_made(
    plugin: TensorParallel, devices: int, words: list[str]
) -> None:
    with pytest.raises(MisconfigurationException) as error:
        quiet(strategy=FiveD(plugin), devices=devices)
    for word in words:
        assert word in str(error.value)


def test_all_problems_come_in_one_error() -> None:
    strategy = FiveD(TensorParallel(1, sequence_parallel=True, plan="colwise"), ZeRO(stage=7))  # type: ignore[arg-type]
    with pytest.raises(MisconfigurationException) as error:
        quiet(strategy=strategy, devices=2)
    assert "3 settings do not work" in str(error.value)


def test_styles_that_are_given_twice_are_refused() -> None:
    styles = {"decoder.lm_head": "vocabulary"}
    strategy = FiveD(TensorParallel(2, plan=styles), plan=ParallelPlan(tensor=styles))
    with pytest.raises(MisconfigurationException, match="given twice"):
        quiet(strategy=strategy, devices=2)


def _deal() -> Dealt:
    return Dealt(Rows(16, 6), 4)


def _fit(rank: int, plugin: Parallelism, heads: int, kv: int) -> None:
    module = decoder(hidden_size=24, num_heads=heads, num_kv_heads=kv)
    fit(rank, module, _deal, partial(FiveD, plugin), devices=2)


@pytest.mark.parametrize(
    ("plugin", "heads", "words"),
    [
        (TensorParallel(2), (3, 3), ["tp=2 does not divide the heads", "(3 heads)", "whole model: 1, 3"]),
        (TensorParallel(2, plan={"nowhere.*": "colwise"}), (4, 2), ["'nowhere.*', which matches no module"]),
        (
            TensorParallel(2, plan={"decoder.layers.*.mlp.up_proj": "colwise"}),
            (4, 2),
            ["decoder.layers.*.mlp.up_proj", "no layer behind it"],
        ),
    ],
)
def test_a_module_that_cannot_be_cut_is_refused_before_training(
    ranks: RankPool, plugin: TensorParallel, heads: tuple[int, int], words: list[str]
) -> None:
    with pytest.raises(RankError) as error:
        ranks(2, _fit, plugin, *heads, **SEPARATE)
    for word in words:
        assert word in str(error.value)

"""Precisions under the tensor axis: as in one process of the same precision, within what the dtype allows."""

from functools import partial
from typing import Any

import pytest

from lightning_5d import TensorParallel, ZeRO
from tests.ranks.pool import RankPool
from tests.tensor_parallel.halves import HALVES, error, gradients, overflow
from tests.tensor_parallel.parity import SEPARATE, compare, decoder

SEQUENCE = pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp+sp"])


@SEQUENCE
def test_a_run_in_double_precision_is_that_of_one_process(ranks: RankPool, sequence: bool) -> None:
    tensor = TensorParallel(2, sequence_parallel=sequence)
    compare(ranks, decoder(), tensor, ZeRO(stage=1), world=4, precision="64-true", tolerance=1e-10)


@pytest.fixture(scope="module")
def alone(rank_pool: RankPool) -> list[Any]:
    """One rank, in double and in half precision."""
    found: list[Any] = rank_pool(
        1, partial(gradients, plugins=(), devices=1, precisions=["64-true", *HALVES]), **SEPARATE
    )[0]
    return found


@SEQUENCE
def test_half_precision_is_as_exact_as_in_one_process(ranks: RankPool, alone: list[Any], sequence: bool) -> None:
    call = partial(gradients, plugins=[TensorParallel(2, sequence_parallel=sequence)], devices=2, precisions=HALVES)
    exact, *halves = alone
    for precision, one, cut in zip(HALVES, halves, ranks(2, call, **SEPARATE)[0], strict=True):
        assert set(cut) == set(exact)
        # Sums over two ranks are rounded once more than those of one process.
        assert 0 < error(cut, exact) < 1.5 * error(one, exact), precision


@SEQUENCE
def test_an_overflow_on_one_rank_is_left_out_by_all(ranks: RankPool, sequence: bool) -> None:
    found = ranks(2, overflow, TensorParallel(2, sequence_parallel=sequence), **SEPARATE)
    assert found[0] == found[1]
    assert found[0]["scales"] == [1024.0, 512.0, 512.0, 512.0]
    assert found[0]["skipped"] == 1
    assert found[0]["finite"]

"""Precisions under the context axis: as in one process of the same precision, within what the dtype allows."""

from functools import partial
from typing import Any

import pytest

from lightning_5d import ContextParallel
from tests.context_parallel.test_training import METHODS
from tests.ranks.pool import RankPool
from tests.tensor_parallel.halves import HALVES, error, gradients, overflow
from tests.tensor_parallel.parity import SEPARATE


@pytest.fixture(scope="module")
def alone(rank_pool: RankPool) -> list[Any]:
    """One rank, in double and in half precision."""
    call = partial(gradients, plugins=(), devices=1, precisions=["64-true", *HALVES])
    found: list[Any] = rank_pool(1, call, **SEPARATE)[0]
    return found


@pytest.mark.parametrize("method", ["ring zigzag", "ulysses", "all_gather zigzag"])
def test_half_precision_is_as_exact_as_in_one_process(ranks: RankPool, alone: list[Any], method: str) -> None:
    call = partial(gradients, plugins=[ContextParallel(2, **METHODS[method])], devices=2, precisions=HALVES)
    exact, *halves = alone
    for precision, one, cut in zip(HALVES, halves, ranks(2, call, **SEPARATE)[0], strict=True):
        assert set(cut) == set(exact)
        assert 0 < error(cut, exact) < 1.5 * error(one, exact), precision


def test_an_overflow_on_one_rank_is_left_out_by_all(ranks: RankPool) -> None:
    found = ranks(2, overflow, ContextParallel(2), **SEPARATE)
    assert found[0] == found[1]
    assert found[0]["scales"] == [1024.0, 512.0, 512.0, 512.0]
    assert found[0]["skipped"] == 1
    assert found[0]["finite"]

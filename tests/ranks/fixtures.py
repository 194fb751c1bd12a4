"""The fixtures that `tests/conftest.py` offers to every test."""

from collections.abc import Iterator

import pytest

from tests.ranks.pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """One pool for the whole session."""
    with RankPool() as pool:
        pool.start()
        yield pool


@pytest.fixture
def ranks(rank_pool: RankPool) -> RankPool:
    """`ranks(4, function, *args)` runs `function(rank, *args)` on four ranks; see `RankPool.__call__`."""
    return rank_pool

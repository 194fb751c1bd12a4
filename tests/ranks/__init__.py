"""Rank processes for tests: a warm pool that functions are sent to."""

from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool

__all__ = ["RankError", "RankPool"]

"""Fixtures for every test."""

from tests.ranks.fixtures import rank_pool, ranks

__all__ = ["rank_pool", "ranks"]

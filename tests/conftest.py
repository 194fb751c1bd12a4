"""Fixtures for every test, and what is told of one that fails."""

import gc
from collections.abc import Generator

import pytest
from _pytest._code.code import ExceptionRepr  # private; checked with pytest 9

from tests.ranks.fixtures import rank_pool, ranks

__all__ = ["rank_pool", "ranks"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: to look at it again and again took more than half of the time of light tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What was printed becomes part of the failure itself: some reports show nothing else, and it cannot be had again."""
    report = yield
    if report.failed and isinstance(report.longrepr, ExceptionRepr):
        for name, content in report.sections:
            report.longrepr.addsection(name, content)
        report.sections = []
    return report

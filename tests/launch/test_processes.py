"""What a process of a job says of itself, and leaves as it was."""

import faulthandler
import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key  # private; checked with pytest 9

from lightning_5d.launch.processes import crashes_shown


@pytest.fixture(autouse=True)
def pytests_own_off(pytestconfig: pytest.Config) -> Iterator[None]:
    """Crashes are not shown by pytest meanwhile."""
    was = faulthandler.is_enabled()
    faulthandler.disable()
    yield
    if was:
        faulthandler.enable(pytestconfig.stash[fault_handler_stderr_fd_key])


@pytest.mark.parametrize("there", [io.StringIO(), object(), None], ids=["no file", "no method", "nothing"])
def test_where_no_file_is_behind_the_errors_crashes_are_not_shown_and_the_run_goes_on(
    there: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", there)
    with crashes_shown():
        assert not faulthandler.is_enabled()


def test_crashes_are_shown_in_a_run_and_not_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    with crashes_shown():
        assert faulthandler.is_enabled()
    assert not faulthandler.is_enabled()


def test_what_the_user_has_set_up_stays() -> None:
    faulthandler.enable(sys.__stderr__)
    with crashes_shown():
        assert faulthandler.is_enabled()
    assert faulthandler.is_enabled()

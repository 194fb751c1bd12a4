"""Functions of other packages that do something else for a while, also for those who have imported them before."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FunctionType
from typing import Any


@contextmanager
def replaced_inside(
    function: Callable[..., Any], variable: str, mine: Callable[..., Any]
) -> Generator[Callable[..., Any], None, None]:
    """Replaces what a wrapper wraps.

    Args:
        function: A wrapper, such as `functools.wraps` makes.
        variable: What it calls the function that it wraps.
        mine: What it calls inside of the context.

    Yields:
        What it has called before.
    """
    closure: Any = function.__closure__
    cell = closure[function.__code__.co_freevars.index(variable)]
    before = cell.cell_contents
    cell.cell_contents = mine
    try:
        yield before
    finally:
        cell.cell_contents = before


@contextmanager
def replaced_wholly(function: Any, mine: Callable[..., Any]) -> Generator[Callable[..., Any], None, None]:
    """Replaces a plain function of Python.

    Args:
        function: It has no closure and no arguments by keyword alone.
        mine: What is called inside of the context, with what the function is called with.

    Yields:
        The function as it was.
    """
    before = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    before.__kwdefaults__ = function.__kwdefaults__
    function.__code__, function.__kwdefaults__ = _forward.__code__, {"_to": mine}
    try:
        yield before
    finally:
        function.__code__, function.__kwdefaults__ = before.__code__, before.__kwdefaults__


def _forward(*args: Any, _to: Any = None, **kwargs: Any) -> Any:
    return _to(*args, **kwargs)

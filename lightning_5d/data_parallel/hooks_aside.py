"""Hooks of modules: taken off for a while, or hidden from selective recomputation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_5d.hidden_operations import hidden_operations


@contextmanager
def hooks_aside(hooks: Iterable[tuple[nn.Module, Collection[int]]]) -> Iterator[None]:
    """A context in which some forward hooks and forward pre-hooks do not run.

    Args:
        hooks: Modules, each with the identifiers of the hooks in question (those of their handles).
    """
    taken = []
    for module, identifiers in hooks:
        ids = set(identifiers)
        for registered in (module._forward_pre_hooks, module._forward_hooks):
            taken.append((registered, ids, OrderedDict(registered)))
            for identifier in ids:
                registered.pop(identifier, None)
    try:
        yield
    finally:
        # In place and in their old order, with what was registered meanwhile behind them.
        for registered, ids, old in reversed(taken):
            added = {key: hook for key, hook in registered.items() if key not in old}
            kept = {key: hook for key, hook in old.items() if key in ids or key in registered}
            registered.clear()
            registered.update({**kept, **added})


# [Note: groups inside of what backward runs again]
# Experts are a group of their own inside of a block. Where that block is recomputed, their hooks run again, and find weights gathered by then,
# or by other means: the operations of these hooks are not those of the first run, by whose numbers selective recomputation goes.
def hide_operations(
    hooks: Iterable[tuple[nn.Module, Collection[int]]], needed: Callable[[], bool] | None = None
) -> None:
    """Lets selective recomputation neither count nor keep operations of some forward hooks and forward pre-hooks.

    Args:
        hooks: As for `hooks_aside`.
        needed: Whether they have anything to do now; they have if not given.
    """
    for module, identifiers in hooks:
        for registered in (module._forward_pre_hooks, module._forward_hooks):
            for identifier in identifiers:
                if identifier in registered:
                    registered[identifier] = _hidden(registered[identifier], needed)


def _hidden(hook: Callable[..., Any], needed: Callable[[], bool] | None) -> Callable[..., Any]:
    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def hidden(*args: Any) -> Any:
        if needed is not None and not needed():
            return None
        with hidden_operations():
            return hook(*args)

    found: Callable[..., Any] = hidden
    return found

"""Hooks of modules, taken off for a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from torch import nn


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

"""Where a model may be cut: its blocks, found or given."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn


@dataclass(frozen=True)
class ParallelPlan:
    """Where a model may be cut.

    Attributes:
        blocks: Fully-qualified names of the repeated blocks, in the order they run; ``*`` stands for one or more
            characters without a dot, as in ``"model.layers.*"``. Found by itself when empty.
        source: Where the blocks came from, for messages; ``"automatic"`` if nobody chose them.
        before: Modules that run before the blocks, where the order of registration says otherwise. One that is named in
            `after` too runs on both sides of them.
        after: Modules that run after the blocks.
    """

    blocks: tuple[str, ...] = ()
    source: str = "given"
    options: Mapping[str, Any] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("blocks", "before", "after"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))

    @property
    def chosen(self) -> bool:
        """Whether a person chose the blocks, and not `find_blocks`."""
        return self.source != "automatic"

    def block_names(self, module: nn.Module) -> list[str]:
        """Names of the module's blocks, in module order.

        Raises:
            ValueError: If a pattern matches no submodule with parameters.
        """
        patterns = [re.compile(re.escape(pattern).replace(r"\*", "[^.]+")) for pattern in self.blocks]
        hits: Counter[str] = Counter()
        names = []
        for name, _ in module.named_modules():
            for text, pattern in zip(self.blocks, patterns, strict=True):
                if pattern.fullmatch(name):
                    hits[text] += 1
                    names.append(name)
                    break
        missing = [text for text in self.blocks if not hits[text]]
        if missing:
            lists = sorted({re.sub(r"\.\d+$", ".*", n) for n, _ in module.named_modules() if re.search(r"\.\d+$", n)})
            raise ValueError(
                f"The plan ({self.source}) names blocks that the module does not have: {', '.join(missing)}."
                f" Lists in the module: {', '.join(lists) or 'none'}."
            )
        return names


def find_plan(module: nn.Module, given: ParallelPlan | None = None) -> ParallelPlan:
    """Finds the plan of a module.

    The first of: `given`, the module's ``parallel_plan()``, the ``parallel_plan`` attribute of one of its children (the
    model inside a LightningModule), and `find_blocks`.

    Args:
        module: The user's LightningModule.
        given: A plan from a plugin's argument.

    Raises:
        TypeError: If something called ``parallel_plan`` is not a `ParallelPlan`.
    """
    if given is not None:
        return _with_blocks(given, module)
    for name, owner in [("", module), *module.named_children()]:
        found = getattr(owner, "parallel_plan", None)
        if found is None:
            continue
        plan = found() if callable(found) else found
        where = f"{type(owner).__name__}.parallel_plan"
        if not isinstance(plan, ParallelPlan):
            raise TypeError(f"{where} is a {type(plan).__name__}; it must be, or return, a ParallelPlan.")
        prefix = f"{name}." if name else ""
        blocks, before, after = (tuple(prefix + n for n in names) for names in (plan.blocks, plan.before, plan.after))
        return _with_blocks(ParallelPlan(blocks, where, plan.options, before, after), module)
    return ParallelPlan(tuple(find_blocks(module)), "automatic")


def _with_blocks(plan: ParallelPlan, module: nn.Module) -> ParallelPlan:
    if plan.blocks:
        return plan
    return replace(plan, blocks=tuple(find_blocks(module)), source="automatic")


def find_blocks(module: nn.Module) -> list[str]:
    """Names of the repeated blocks of a module, in module order.

    A block is a child of a `ModuleList` or `Sequential` that holds at least two children of its class with parameters, and
    is not inside another block. Encoder and decoder lists are both found.
    """
    blocks: list[str] = []
    for name, container in module.named_modules():
        if any(name == block or name.startswith(block + ".") for block in blocks):
            continue
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        children = [
            (child_name, child)
            for child_name, child in container.named_children()
            if any(True for _ in child.parameters())
        ]
        counts = Counter(type(child) for _, child in children)
        if not counts:
            continue
        kind, count = counts.most_common(1)[0]
        if count < 2 or issubclass(kind, nn.ModuleList | nn.ModuleDict):
            continue
        prefix = f"{name}." if name else ""
        blocks += [prefix + child_name for child_name, child in children if type(child) is kind]
    return blocks

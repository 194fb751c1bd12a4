"""Which stage holds what: the blocks in order, the modules around them, and the weights that several stages use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

from torch import nn

from lightning_5d.plan import ParallelPlan

Side = Literal["before", "after", "both"]


@dataclass(frozen=True)
class Place:
    """A position in the module tree that holds a block, or a module that runs before or after the blocks.

    Attributes:
        name: Its fully-qualified name.
        block: The block's number, or ``None`` for another module.
        side: When another module runs; ``None`` for a block.
    """

    name: str
    block: int | None = None
    side: Side | None = None


@dataclass(frozen=True)
class Anatomy:
    """A module seen from its blocks.

    Attributes:
        blocks: Names of the blocks in the order they run.
        places: Every position that holds a block or an outermost other module with weights. One module may be at several.
        between: Names of modules with weights that lie between two blocks and are none.
    """

    blocks: tuple[str, ...]
    places: tuple[Place, ...]
    between: tuple[str, ...] = ()

    def outer(self, side: Literal["before", "after"]) -> tuple[str, ...]:
        """Names of the modules that run before or after the blocks."""
        return tuple(place.name for place in self.places if place.side in (side, "both"))


@dataclass(frozen=True)
class StageLayout:
    """Which stage holds what.

    Attributes:
        anatomy: The module's blocks and the modules around them.
        sizes: How many blocks each stage has.
        owners: Name of each parameter, under all of its names, and the stages that use it.
    """

    anatomy: Anatomy
    sizes: tuple[int, ...]
    owners: Mapping[str, tuple[int, ...]]

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.sizes)

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the blocks in the order they run."""
        return self.anatomy.blocks

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The first block of each stage, and the one after its last."""
        return tuple(pairwise((0, *accumulate(self.sizes))))

    def stages_of(self, place: Place) -> tuple[int, ...]:
        """The stages that hold what is at a place."""
        return _stages_of(place, self.spans)

    def describe(self) -> str:
        """One line: what each stage holds."""
        parts = []
        for stage, (low, high) in enumerate(self.spans):
            held = [*self.anatomy.outer("before")] if stage == 0 else []
            if high > low:
                held.append(self.blocks[low] if high == low + 1 else f"{self.blocks[low]} … {self.blocks[high - 1]}")
            if stage == self.stages - 1:
                held += self.anatomy.outer("after")
            parts.append(f"stage {stage}: {', '.join(held) or 'nothing'}")
        return "; ".join(parts)


def _stages_of(place: Place, spans: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    if place.block is not None:
        return tuple(stage for stage, (low, high) in enumerate(spans) if low <= place.block < high)
    first, last = 0, len(spans) - 1
    stages = {"before": {first}, "after": {last}, "both": {first, last}}[place.side or "both"]
    return tuple(sorted(stages))


def owners_of(module: nn.Module, places: Sequence[Place], sizes: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The stages that use each parameter of a module, by name; under all names of a parameter that has several.

    A parameter outside all places, such as a class token that the model itself holds, belongs to all stages.
    """
    spans = tuple(pairwise((0, *accumulate(sizes))))
    by_place = {place.name: _stages_of(place, spans) for place in places}
    everyone = tuple(range(len(sizes)))
    stages: dict[int, set[int]] = {}
    names: dict[str, int] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[name] = id(parameter)
        stages.setdefault(id(parameter), set()).update(next(_found(name, by_place), everyone))
    return {name: tuple(sorted(stages[key])) for name, key in names.items()}


def _found(name: str, by_place: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    while "." in name:
        name = name.rpartition(".")[0]
        if name in by_place:
            yield by_place[name]


def dissect(module: nn.Module, plan: ParallelPlan) -> Anatomy:
    """Finds a module's blocks and what lies around them.

    Blocks are those of the plan if a person chose them. Otherwise they are those of the list with the most parameters, and what
    else has weights in that list: all of a `ModuleList`, whose members are used alike, and what lies between two blocks of
    a `Sequential`, whose members run in order.

    Raises:
        ValueError: If the plan names what the module does not have.
    """
    names = plan.block_names(module)
    if not plan.chosen and names:
        names = _members(module, main_list(module, names))
    blocks = {id(module.get_submodule(name)): index for index, name in enumerate(names)}
    around = {id(module.get_submodule(parent)) for name in names for parent in _parents(name)}
    sides = _Sides(module, plan)
    places: list[Place] = []
    between: list[str] = []
    seen: set[int] = set()
    visited = {id(module)}

    def walk(owner: nn.Module, prefix: str) -> None:
        for key, child in owner._modules.items():
            if child is None:
                continue
            name = f"{prefix}{key}"
            if id(child) in blocks:
                seen.add(blocks[id(child)])
                places.append(Place(name, block=blocks[id(child)]))
            elif id(child) in around or sides.inside(name):
                if id(child) not in visited:
                    visited.add(id(child))
                    walk(child, f"{name}.")
            elif not any(True for _ in child.parameters()):
                continue
            elif isinstance(child, nn.ModuleList | nn.ModuleDict):
                walk(child, f"{name}.")
            else:
                given = sides.given(name)
                if given is None and 0 < len(seen) < len(names):
                    between.append(name)
                places.append(Place(name, side=given or ("after" if seen else "before")))

    walk(module, "")
    return Anatomy(tuple(names), tuple(places), tuple(between))


def main_list(module: nn.Module, names: Sequence[str]) -> str:
    """The list among those of some blocks that has the most parameters."""
    sizes = list_sizes(module, names)
    return max(sizes, key=lambda name: sizes[name])


def list_sizes(module: nn.Module, names: Sequence[str]) -> dict[str, int]:
    """Number of parameters in the lists that hold some blocks."""
    sizes: dict[str, int] = {}
    for name in names:
        count = sum(parameter.numel() for parameter in module.get_submodule(name).parameters())
        sizes[name.rpartition(".")[0]] = sizes.get(name.rpartition(".")[0], 0) + count
    return sizes


def _members(module: nn.Module, container: str) -> list[str]:
    found = module.get_submodule(container)
    names = [
        key for key, child in found._modules.items() if child is not None and any(True for _ in child.parameters())
    ]
    prefix = f"{container}." if container else ""
    if isinstance(found, nn.Sequential):
        kinds = [type(found._modules[key]) for key in names]
        common = max(dict.fromkeys(kinds), key=kinds.count)
        inside = [index for index, kind in enumerate(kinds) if kind is common]
        names = names[inside[0] : inside[-1] + 1]
    return [f"{prefix}{key}" for key in names]


def _parents(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


class _Sides:
    """What a plan says about when modules run."""

    def __init__(self, module: nn.Module, plan: ParallelPlan) -> None:
        names = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
        self._before = _matching(names, plan.before, "before", plan)
        self._after = _matching(names, plan.after, "after", plan)

    def given(self, name: str) -> Side | None:
        """When a module runs, if the plan says so."""
        if name in self._before:
            return "both" if name in self._after else "before"
        return "after" if name in self._after else None

    def inside(self, name: str) -> bool:
        """Whether the plan says something about modules inside of a module, and nothing about itself."""
        return self.given(name) is None and any(n.startswith(f"{name}.") for n in (*self._before, *self._after))


def _matching(names: Sequence[str], patterns: Sequence[str], what: str, plan: ParallelPlan) -> set[str]:
    found: set[str] = set()
    for text in patterns:
        pattern = re.compile(re.escape(text).replace(r"\*", "[^.]+"))
        hits = {name for name in names if pattern.fullmatch(name)}
        if not hits:
            raise ValueError(f"The plan ({plan.source}) has {what}={text!r}, which the module does not have.")
        found |= hits
    return found

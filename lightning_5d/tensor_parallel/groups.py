"""Which column layers and row layers belong together, and where such a region is entered."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import nn

from lightning_5d.parallelism import Problem
from lightning_5d.tensor_parallel import problems as say
from lightning_5d.tensor_parallel.adapters import Layer
from lightning_5d.tensor_parallel.heads import role_of
from lightning_5d.tensor_parallel.layout import Door
from lightning_5d.tensor_parallel.survey import Survey

_SECOND_INPUTS = frozenset(
    {"key_value_states", "encoder_hidden_states", "encoder_output", "context", "memory", "key_states"}
)


@dataclass(frozen=True)
class Group:
    """A region in the making.

    Attributes:
        name: The module at whose door it is entered; the lowest that holds all of its layers if it is entered at those.
        columns: Its column layers, in module order.
        rows: Its row layers.
        door: Where it is entered.
        whole_inside: All outputs of the columns are made whole again, and the rows take their part of whole inputs.
    """

    name: str
    columns: tuple[Layer, ...]
    rows: tuple[Layer, ...]
    door: Door
    whole_inside: bool

    @property
    def attention(self) -> bool:
        """Whether it computes on heads."""
        return any(role_of(layer.name) in ("q", "qkv") for layer in self.columns)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All of its layers."""
        return (*self.columns, *self.rows)


def group_layers(
    module: nn.Module, survey: Survey, blocks: list[str], sequence_parallel: bool
) -> tuple[list[Group], list[Problem]]:
    """Regions of the column and row layers that a plan names, and which of those have no partner.

    A column layer whose output is gathered, and a row layer that splits its input, need none.
    """
    order = {name: place for place, (name, _) in enumerate(module.named_modules())}
    groups: list[Group] = []
    lonely: list[str] = []
    for scope in [*blocks, None]:
        names = [
            name
            for name in [*survey.columns, *survey.rows]
            if (scope is None and not any(name.startswith(f"{block}.") for block in blocks))
            or (scope is not None and name.startswith(f"{scope}."))
        ]
        left = sorted(names, key=order.__getitem__)
        for place in _places(left, scope):
            inside = [name for name in left if not place or name.startswith(f"{place}.")]
            parts = _split(module, place, inside, survey, blocks, sequence_parallel)
            for columns, rows, door in parts:
                taken = {*columns, *rows}
                left = [name for name in left if name not in taken]
                whole = all(survey.styles[name].whole_outside for name in taken)
                layers = (tuple(survey.columns[n] for n in columns), tuple(survey.rows[n] for n in rows))
                name = _closer(columns, place) if door == "layers" else None
                if name is not None and _door(module, name, *layers, blocks, survey, sequence_parallel) == "module":
                    groups.append(Group(name, *layers, "module", whole))
                else:
                    groups.append(Group(place, *layers, door, whole))
        lonely += left
    groups.sort(key=lambda group: min(order[layer.name] for layer in group.layers))
    without = [name for name in lonely if not survey.styles[name].whole_outside]
    problems = [
        say.alone(names, kind)
        for kind, layers in (("column", survey.columns), ("row", survey.rows))
        if (names := [name for name in without if name in layers])
    ]
    return groups, problems


def _places(names: Sequence[str], scope: str | None) -> list[str]:
    """Modules around the layers, innermost first, none outside of the block."""
    places: dict[str, None] = {}
    for name in names:
        while name:
            name = name.rpartition(".")[0]
            places[name] = None
            if name == scope:
                break
    return sorted(places, key=lambda place: -len(place.split(".")) if place else 1)


def _closer(columns: Sequence[str], place: str) -> str | None:
    """The lowest module that holds all column layers, if it is inside of the one that holds the row layer too.

    As in BERT, where queries, keys and values are one module, and the row layer is beside a residual and a norm in another.
    """
    parents = [column.split(".")[:-1] for column in columns]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*parents, strict=False))
    name = ".".join(parts[0] for parts in shared)
    return name if len(name) > len(place) else None


def _split(
    module: nn.Module, place: str, names: list[str], survey: Survey, blocks: list[str], sequence_parallel: bool
) -> list[tuple[list[str], list[str], Door]]:
    """The regions that a module's layers, those that are not yet in one, make up: columns, rows, door."""
    columns = [name for name in names if name in survey.columns]
    rows = [name for name in names if name in survey.rows]
    if not columns or not rows:
        return []
    door = _door(module, place, [survey.columns[n] for n in columns], [survey.rows[n] for n in rows], blocks, survey, sequence_parallel)  # fmt: skip
    if door == "module" and len(rows) == 1 and all(role_of(name) for name in columns):
        return [(columns, rows, door)]
    parts: list[tuple[list[str], list[str], Door]] = []
    left = list(columns)
    for row in rows:
        before = [name for name in left if names.index(name) < names.index(row) and _fits(name, row, survey)]
        partners = before or [name for name in left if _fits(name, row, survey)]
        if partners:
            parts.append((partners, [row], door))
            left = [name for name in left if name not in partners]
    if door == "module" and len(parts) > 1:
        # One door cannot be gone through twice.
        return [([c for cs, _, _ in parts for c in cs], [r for _, rs, _ in parts for r in rs], door)]
    return parts


def _fits(column: str, row: str, survey: Survey) -> bool:
    """Whether a row layer may take what a column layer gives, by their widths; keys and values go along with queries."""
    inputs, style = survey.rows[row].linear.in_features, survey.styles[column]
    outputs = survey.columns[column].linear.out_features
    role = role_of(column)
    if role in ("k", "v", "kv"):
        queries = [
            name
            for name in survey.columns
            if name.rpartition(".")[0] == column.rpartition(".")[0] and role_of(name) == "q"
        ]
        return not queries or any(_fits(name, row, survey) for name in queries)
    if role == "qkv":
        return outputs > inputs
    return outputs in (inputs, inputs * style.packed, 2 * inputs)


def _door(
    module: nn.Module,
    place: str,
    columns: Sequence[Layer],
    rows: Sequence[Layer],
    blocks: list[str],
    survey: Survey,
    sequence_parallel: bool,
) -> Door:
    """Where a region is entered.

    At its module, unless something in that module goes past the layers: there an entry would sum up gradients that are
    complete. Blocks have residuals; a norm of the hidden size, in a module with its own row layer, has one beside it more often than not; and modules
    with a second input give it to some of the layers. A sequence, though, has to be whole at the door of an attention, which reads its
    length there.
    """
    if not place or place in blocks or any(block.startswith(f"{place}.") for block in blocks):
        return "layers"
    if any(name.startswith(f"{place}.") for name in [*survey.embeddings, *survey.heads]):
        return "layers"
    region = module.get_submodule(place)
    hidden = {layer.linear.in_features for layer in columns} | {layer.linear.out_features for layer in rows}
    parents = {row.name.rpartition(".")[0] for row in rows} - {place}
    for name, child in region.named_modules(prefix=place):
        if is_norm(child) and norm_size(child) in hidden and role_of(name) is None:
            beside_row = name.rpartition(".")[0] in parents
            if beside_row or not sequence_parallel:
                return "layers"
    inputs = inspect.signature(type(region).forward).parameters
    return "layers" if not sequence_parallel and _SECOND_INPUTS & set(inputs) else "module"


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm with weights, by its class's name."""
    return "norm" in type(module).__name__.lower() and any(True for _ in module.parameters(recurse=False))


def norm_size(norm: nn.Module) -> int:
    """Over how many features a norm with weights goes."""
    return max(weight.numel() for weight in norm.parameters(recurse=False))

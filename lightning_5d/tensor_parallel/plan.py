"""From a module and its plan to a layout: which rank stores what, and what stays whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import nn

from lightning_5d.parallelism import Problem
from lightning_5d.plan import ParallelPlan
from lightning_5d.tensor_parallel import problems as say
from lightning_5d.tensor_parallel.adapters import Layer
from lightning_5d.tensor_parallel.attributes import local_attributes
from lightning_5d.tensor_parallel.groups import Group, group_layers, is_norm
from lightning_5d.tensor_parallel.heads import Heads, find_heads, role_of
from lightning_5d.tensor_parallel.layout import Region, TensorLayout
from lightning_5d.tensor_parallel.partial import norms_over_cut, own_modules, partial_along_sequence, partial_inside
from lightning_5d.tensor_parallel.problems import generic
from lightning_5d.tensor_parallel.report import reported
from lightning_5d.tensor_parallel.rows import Rows, even
from lightning_5d.tensor_parallel.sequence_bounds import find_sequence
from lightning_5d.tensor_parallel.shards import features, head_rows, padded
from lightning_5d.tensor_parallel.survey import Survey, survey


def layout_of(
    module: nn.Module, plan: ParallelPlan, size: int, sequence_parallel: bool = False
) -> tuple[TensorLayout, list[Problem]]:
    """What the tensor axis makes of a module.

    Nothing is changed. Modules may lie on the meta device.

    Args:
        module: The user's module, whole.
        plan: Its plan, as `find_plan` gives it.
        size: Ranks of the axis.
        sequence_parallel: Whether the sequence is cut as well, outside of regions.

    Returns:
        The layout, which is empty if there are problems, and those, all that could be found.
    """
    try:
        blocks = plan.block_names(module)
    except ValueError as error:
        return TensorLayout(), [Problem(str(error), "Give FiveD(plan=ParallelPlan([...])).")]
    if not plan.tensor:
        linears = [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]
        return TensorLayout(), [say.no_plan(type(module).__name__, linears)]
    found = survey(module, plan, blocks)
    groups, problems = group_layers(module, found, blocks, sequence_parallel)
    draft = _Draft(module, found, size, [*found.problems, *problems])
    for group in groups:
        draft.add_region(group, groups, blocks)
    draft.add_layers_alone(groups, blocks if sequence_parallel else [])
    draft.add_vocabulary()
    draft.check_degrees()
    cut = None
    if sequence_parallel:
        cut, problems = find_sequence(module, plan, blocks, groups)
        draft.problems += problems
        draft.partial |= partial_along_sequence(module, cut, draft.complete) if cut else set()
    draft.check_ties()
    if draft.problems:
        return TensorLayout(), list(dict.fromkeys(draft.problems))
    layout = TensorLayout(
        regions=tuple(draft.regions),
        embeddings=tuple(found.embeddings),
        heads=tuple(found.heads),
        gathered=tuple(draft.gathered),
        split=tuple(draft.split),
        weights=draft.weights,
        partial=frozenset(draft.partial - draft.weights.keys()),
        sequence=cut,
    )
    return reported(module, layout, size, draft.words), []


@dataclass
class _Draft:
    """A layout in the making."""

    module: nn.Module
    survey: Survey
    size: int
    problems: list[Problem]
    regions: list[Region] = field(default_factory=list)
    gathered: list[str] = field(default_factory=list)
    split: list[str] = field(default_factory=list)
    weights: dict[str, Rows] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    complete: set[str] = field(default_factory=set)
    words: dict[str, str] = field(default_factory=dict)
    conditions: list[Callable[[int], bool]] = field(default_factory=list)
    clashes: dict[str, None] = field(default_factory=dict)
    heads: list[Heads] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.words |= self.survey.notes

    def add_region(self, group: Group, groups: Sequence[Group], blocks: Sequence[str]) -> None:
        """Adds a region, the shards of its layers, and which of its other weights have partial gradients."""
        heads = self._heads(group) if group.attention and not group.whole_inside else None
        for layer in group.columns:
            self._column(layer, heads, group)
        for layer in group.rows:
            self._row(layer, heads, group)
        modules = list(own_modules(self.module, group, groups, blocks))
        attributes = {} if group.whole_inside else local_attributes(self.module, group, heads, self.size)
        if group.door == "module":
            self.words.setdefault(group.name, "region: entered here once")
            self._cut_per_head(modules, heads)
        for name, count in norms_over_cut(group, modules, self.survey, heads):
            self.problems.append(say.norm_over_cut(name, count, "queries or keys" if group.attention else "features"))
        partial, complete = partial_inside(group, modules, self.survey, heads)
        self.partial |= partial
        self.complete |= complete
        columns, rows = (tuple(layer.name for layer in layers) for layers in (group.columns, group.rows))
        self.regions.append(Region(group.name, columns, rows, group.door, attributes))

    def _heads(self, group: Group) -> Heads | None:
        written = [style.heads for layer in group.columns if (style := self.survey.styles[layer.name]).heads]
        found = find_heads(self.module, group.name, group.columns, written[0] if written else None)
        if isinstance(found, str):
            self.problems.append(say.no_heads(group.name or type(self.module).__name__, found))
            return None
        self.heads.append(found)
        self._divides(found.fits, f"the heads of {generic(group.name) or type(self.module).__name__} ({found})")
        return found

    def _divides(self, fits: Callable[[int], bool], what: str) -> bool:
        self.conditions.append(fits)
        if not fits(self.size):
            self.clashes[what] = None
        return fits(self.size)

    def _column(self, layer: Layer, heads: Heads | None, group: Group) -> None:
        style, width, role = self.survey.styles[layer.name], layer.linear.out_features, role_of(layer.name)
        if style.whole_outside:
            self.gathered.append(layer.name)
            if self._divides(
                lambda n: width % n == 0, f"the {width} features of {generic(group.name) or generic(layer.name)}"
            ):
                self._cut_outputs(layer, even(0, width), "column, its outputs made whole")
        elif heads is not None:
            self._attention_column(layer, heads, group)
        elif width % style.packed:
            self.problems.append(say.packed_parts(layer.name, width, style.packed))
        elif role is None or not group.attention:
            for row in group.rows:
                if style.packed == 1 and width == 2 * row.linear.in_features:
                    what = f"the {row.linear.in_features} inputs of {generic(row.name)}"
                    self.problems.append(say.perhaps_packed(layer.name, width, what))
            part = width // style.packed
            if self._divides(
                lambda n: part % n == 0, f"the {part} features of {generic(group.name) or generic(layer.name)}"
            ):
                share = f"{part // self.size} of {part} features"
                parts = f", of {style.packed} parts each" if style.packed > 1 else ""
                self._cut_outputs(layer, features(0, width, style.packed, self.size), f"column, {share}{parts}")

    def _attention_column(self, layer: Layer, heads: Heads, group: Group) -> None:
        style, width, role = self.survey.styles[layer.name], layer.linear.out_features, role_of(layer.name)
        parent = self.module.get_submodule(layer.name.rpartition(".")[0])
        if role == "kv" and style.packed == 1 and not hasattr(parent, "kv_lora_rank"):
            # Keys, then values; multi-head latent attention, which has both of a head together, is known by its rank.
            self.problems.append(say.perhaps_packed(layer.name, width, "the keys"))
        elif heads.fits(self.size):
            made = head_rows(width, style, role, heads, self.size)
            if made is None:
                self.problems.append(say.not_of_heads(layer.name, width, str(heads)))
            else:
                self._cut_outputs(layer, made[0], f"column, {made[1]}")

    def _cut_outputs(self, layer: Layer, rows: Rows, what: str) -> None:
        self.words[layer.name] = what
        self._cut(
            rows,
            *(f"{layer.base}.{own}" for own in ("weight", "bias") if layer.linear._parameters.get(own) is not None),
        )
        self._cut(rows, *layer.outs, *layer.out_vectors)
        self.partial |= {*layer.ins, *layer.in_vectors}

    def _row(self, layer: Layer, heads: Heads | None, group: Group) -> None:
        style, width = self.survey.styles[layer.name], layer.linear.in_features
        for name in layer.out_vectors:
            self.problems.append(say.adapter_on_row(layer.name, name))
        parts = 1 if style.whole_outside else style.packed
        if width % parts:
            self.problems.append(say.packed_parts(layer.name, width, parts))
            return
        if heads is not None and width % (heads.query * parts):
            self.problems.append(say.not_of_heads(layer.name, width, str(heads)))
            return
        part = width // parts
        if style.whole_outside:
            self.split.append(layer.name)
        if heads is not None and not heads.fits(self.size):
            return
        if not self._divides(
            lambda n: part % n == 0, f"the {part} features of {generic(group.name) or generic(layer.name)}"
        ):
            return
        rows = features(1, width, parts, self.size)
        self._cut(rows, f"{layer.base}.weight", *layer.ins)
        self._cut(Rows(0, rows.whole, rows.index), *layer.in_vectors)
        self.partial |= set(layer.outs)
        self.words[layer.name] = (
            "row, takes its part of whole inputs" if style.whole_outside else "row, summed over ranks"
        )

    def _cut(self, rows: Rows, *names: str) -> None:
        self.weights |= dict.fromkeys(names, rows)

    def _cut_per_head(self, modules: Sequence[tuple[str, nn.Module]], heads: Heads | None) -> None:
        """Cuts weights that have a value, or a vector, for each head: norms of Cohere's kind, attention sinks."""
        if heads is None or not heads.fits(self.size):
            return
        queries = even(0, heads.query)
        keys = [kv for rank in range(self.size) for kv in heads.kv_of(rank, self.size)]
        kv = (
            even(0, heads.kv)
            if heads.copies(self.size) == 1
            else Rows(0, heads.kv, tuple(keys), heads.copies(self.size))
        )
        for owner, child in modules:
            role = role_of(owner)
            for own, weight in child.named_parameters(recurse=False):
                name = f"{owner}.{own}" if owner else own
                style = self.survey.parameters.get(name)
                norm = is_norm(child) and weight.ndim == 2 and role in ("q", "k")
                if name in self.weights or not (norm or (style is not None and style.kind == "column")):
                    continue
                rows = kv if role == "k" else queries
                if weight.ndim and weight.shape[0] == rows.whole:
                    self._cut(rows, name)
                    self.words.setdefault(owner, "cut, one entry for each head")

    def add_layers_alone(self, groups: Sequence[Group], sequence_blocks: Sequence[str]) -> None:
        """Adds layers outside of regions: columns that are made whole again, and rows that take a part of whole inputs.

        Those in blocks between which the sequence is cut stay whole: their ranks do not have the same inputs.
        """
        grouped = {layer.name for group in groups for layer in group.layers}
        for name, layer in (self.survey.columns | self.survey.rows).items():
            if name in grouped or not self.survey.styles[name].whole_outside:
                continue
            if any(name.startswith(f"{block}.") for block in sequence_blocks):
                self.words[name] = "replicated, on its part of the sequence"
            elif name in self.survey.columns:
                self._column(layer, None, Group(name, (layer,), (), "layers", True))
            else:
                self._row(layer, None, Group(name, (), (layer,), "layers", True))

    def add_vocabulary(self) -> None:
        """Adds embeddings and heads, with rows of padding where the ranks do not divide the vocabulary."""
        for name in self.survey.embeddings:
            rows = padded(self.module.get_parameter(f"{name}.weight").shape[0], self.size)
            self._cut(rows, f"{name}.weight")
            self.words[name] = f"vocabulary, {self._share(rows)}"
        for layer in self.survey.heads.values():
            if layer.name != layer.base or layer.ins or layer.outs:
                self.problems.append(say.adapted_head(layer.name))
                continue
            rows = padded(layer.linear.out_features, self.size)
            self._cut_outputs(layer, rows, f"head, {self._share(rows)}; logits stay cut")

    def _share(self, rows: Rows) -> str:
        padding = rows.stored - rows.whole
        return f"{rows.stored // self.size} of {rows.whole} rows" + (f" ({padding} of padding)" if padding else "")

    def check_degrees(self) -> None:
        """One problem for everything that the degree does not divide."""
        if self.clashes:
            what = ", nor ".join(self.clashes)
            self.problems.append(say.degrees_clash(self.size, what, self.conditions, self._copied))

    def _copied(self, degree: int) -> str:
        most = max((heads.copies(degree) for heads in self.heads if heads.fits(degree)), default=1)
        return f" (with each key/value head on {most} ranks)" if most > 1 else ""

    def check_ties(self) -> None:
        """Gives a weight's rows to all of its names, and finds weights whose names contradict each other."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        for same in names.values():
            rows = {name: self.weights.get(name) for name in same}
            known = [found for name, found in rows.items() if found is not None or self._computes(name)]
            if not any(known):
                continue
            if any(found != known[0] for found in known):
                owners = [name.rpartition(".")[0] for name in same]
                self.problems.append(say.unclear_ties(same, [self.words.get(owner, "replicated") for owner in owners]))
            self.weights |= {name: found for name in same for found in known if found is not None}

    def _computes(self, name: str) -> bool:
        """Whether the module that has a weight computes with it by itself, and would meet a part of it unprepared."""
        return isinstance(self.module.get_submodule(name.rpartition(".")[0]), nn.Linear | nn.Embedding)

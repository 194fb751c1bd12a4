"""Which whole weights have partial gradients: each rank uses them on what it alone has, so that theirs is a summand."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import nn

from lightning_5d.tensor_parallel import layout
from lightning_5d.tensor_parallel.groups import Group, is_norm, norm_size
from lightning_5d.tensor_parallel.heads import Heads, role_of
from lightning_5d.tensor_parallel.survey import Survey


def own_modules(
    module: nn.Module, group: Group, groups: Sequence[Group], blocks: Sequence[str]
) -> Iterator[tuple[str, nn.Module]]:
    """A region's modules, without those of regions inside of it, and of blocks if it lies around them."""
    prefix = f"{group.name}." if group.name else ""
    others = [g.name for g in groups if g.name != group.name and g.name.startswith(prefix)]
    others += [block for block in blocks if block != group.name and block.startswith(prefix)]
    for name, child in module.get_submodule(group.name).named_modules(prefix=group.name):
        if not any(name == other or name.startswith(f"{other}.") for other in others):
            yield name, child


def partial_inside(
    group: Group, modules: Sequence[tuple[str, nn.Module]], found: Survey, heads: Heads | None
) -> tuple[set[str], set[str]]:
    """Whole weights of a region with partial gradients, and those whose gradients are complete although they are inside.

    Beyond a module's door everything has a summand, but for biases that are added to sums. Where a region is entered at
    its layers, only what lies between them has: an adapter's inner weights, and norms of single heads. Where outputs are made
    whole at once and inputs split, every rank computes all there is between them.
    """
    hidden = {layer.linear.in_features for layer in group.columns}
    head_sizes = (
        {layer.linear.out_features // heads.query for layer in group.columns if role_of(layer.name) == "q"}
        if heads
        else set()
    )
    adapters = {name for layer in group.columns for name in (*layer.ins, *layer.in_vectors)}
    adapters |= {name for layer in group.rows for name in layer.outs}
    biases = {f"{row.base}.bias" for row in group.rows}
    partial, complete = set(adapters), set[str]()
    for name, child in modules:
        own = {f"{name}.{o}" if name else o for o, _ in child.named_parameters(recurse=False)} - adapters - biases
        norm = is_norm(child)
        before = norm and norm_size(child) in hidden and role_of(name) is None
        if name in found.summed:
            partial |= own
        elif group.whole_inside:
            (partial if before and group.door == "module" else complete).update(own)
        elif group.door == "module" or (norm and (role_of(name) in ("q", "k") or norm_size(child) in head_sizes)):
            partial |= own
    return partial, complete


def norms_over_cut(
    group: Group, modules: Sequence[tuple[str, nn.Module]], found: Survey, heads: Heads | None
) -> list[tuple[str, int]]:
    """Norms of a region that go over more than a rank has, and over how many features."""
    hidden = {layer.linear.in_features for layer in group.columns}
    cut = {
        layer.name: layer.linear.out_features for layer in group.columns if not found.styles[layer.name].whole_outside
    }
    heads_of = {width // heads.query for name, width in cut.items() if role_of(name) == "q"} if heads else set()
    result = []
    for name, child in modules:
        if not is_norm(child) or any(weight.ndim != 1 for weight in child.parameters(recurse=False)):
            continue
        size = norm_size(child)
        between = role_of(name) in ("q", "k") or (size not in hidden and bool(group.name))
        if between and size in cut.values() and size not in heads_of:
            result.append((name, size))
    return result


def partial_along_sequence(module: nn.Module, cut: layout.Sequence, complete: Collection[str]) -> set[str]:
    """Weights that see a part of the sequence each: those of blocks, and of the norm that comes before it is whole."""
    owners = tuple(f"{name}." for name in (*cut.blocks, cut.whole))
    names = (name for name, _ in module.named_parameters(remove_duplicate=False))
    return {name for name in names if name.startswith(owners) and name not in complete}

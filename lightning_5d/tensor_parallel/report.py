"""What a layout makes of each module, as a table for people."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from lightning_5d.tensor_parallel.layout import Became, TensorLayout
from lightning_5d.tensor_parallel.problems import generic

_COLUMNS = ("module", "class", "became", "on one rank", "partial gradients")


def reported(module: nn.Module, layout: TensorLayout, size: int, words: Mapping[str, str]) -> TensorLayout:
    """The layout with its `became`: every module that has weights or that something is said about, in module order.

    Args:
        module: The whole module.
        layout: What becomes of it.
        size: Ranks of the axis.
        words: What is said about modules.
    """
    became: dict[str, Became] = {}
    seen: dict[int, str] = {}
    blocks = layout.sequence.blocks if layout.sequence else ()
    for name, child in module.named_modules():
        shapes, ties = {}, []
        for own, weight in child.named_parameters(recurse=False):
            full = f"{name}.{own}" if name else own
            first = seen.setdefault(id(weight), full)
            if first != full:
                ties.append(first)
                continue
            shape = list(weight.shape)
            if full in layout.weights:
                rows = layout.weights[full]
                shape[rows.dim] = rows.stored // size
            shapes[own] = tuple(shape)
        if name not in words and not shapes and not ties and name not in blocks:
            continue
        said = words.get(name, "replicated" if shapes or ties else "")
        said += f", tied to {', '.join(ties)}" if ties else ""
        if layout.sequence is not None:
            if name == blocks[0]:
                said = _join(said, "from here on each rank has a part of the sequence")
            if name == layout.sequence.whole:
                said = _join(said, "behind it the sequence is whole again")
        if said:
            became[name] = Became(type(child).__name__, said, shapes)
    return replace(layout, became=became)


def _join(said: str, more: str) -> str:
    return f"{said}; {more}" if said else more


def describe_layout(layout: TensorLayout, size: int) -> str:
    """A table of what became of each module, modules of several layers that became the same in one line.

    Args:
        layout: As `layout_of` gives it.
        size: Ranks of the axis.
    """
    groups: dict[tuple[str, ...], int] = {}
    local = whole = 0
    for name, became in layout.became.items():
        full = {own: f"{name}.{own}" if name else own for own in became.shapes}
        shapes = ", ".join(f"{own} {'x'.join(map(str, shape)) or 'scalar'}" for own, shape in became.shapes.items())
        partial = ", ".join(own for own in became.shapes if full[own] in layout.partial)
        line = (generic(name) or "(the module itself)", became.kind, became.what, shapes, partial)
        groups[line] = groups.get(line, 0) + 1
        for own, shape in became.shapes.items():
            local += math.prod(shape)
            rows = layout.weights.get(full[own])
            kept = {rows.dim: rows.whole} if rows else {}
            whole += math.prod(kept.get(dim, length) for dim, length in enumerate(shape))
    lines: list[tuple[str, ...]] = [_COLUMNS]
    lines += [(f"{line[0]} ({count})" if count > 1 else line[0], *line[1:]) for line, count in groups.items()]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    table = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    table.insert(1, "  ".join("-" * width for width in widths))
    share = f"{local / whole:.1%}" if whole else "0%"
    return "\n".join([*table, "", f"Tensor axis of {size}: {local:,} of {whole:,} weights on each rank ({share})."])

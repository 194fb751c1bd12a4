"""The picture of the experts' loads: layers by experts, over steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.figure import Figure, SubFigure
from torch import Tensor

from lightning_5d.expert_parallel.load_history import LoadHistory

_PANELS = 8
"""So many layers are drawn over time; of more, some from the first to the last, and all of them side by side for the last steps."""

_HOTTEST = 4.0
"""Loads of so many times the mean, and all above, have the same colour."""


@dataclass(frozen=True)
class _Quantity:
    """One column of panels."""

    title: str
    of_layer: dict[str, Tensor]  # (columns, E) each
    norm: Normalize
    colours: str


def draw_loads(history: LoadHistory, title: str) -> Figure:
    """Imbalance of all layers over optimizer steps; below, for each layer, its experts' tokens, and what was dropped and the bias where there are such.

    Args:
        history: With at least one column.
        title: Its title.
    """
    quantities = _quantities(history)
    layers = _chosen(list(history.layers))
    all_layers = len(layers) < len(history.layers)
    heights = [2.4, *(_height(history.layers[name]) for name in layers)]
    heights += [1.0 + min(0.12 * len(history.layers), 4.0)] if all_layers else []
    figure = Figure(figsize=(4.2 + 4.0 * max(len(quantities), 2), sum(heights) + 1.0), layout="constrained")
    figure.suptitle(title)
    ratios = _ratios(heights, len(layers), all_layers)
    top, *below = figure.subfigures(2 + all_layers, 1, squeeze=False, height_ratios=ratios)[:, 0]
    _draw_imbalance(top.subplots(), history)
    _draw_layers(below[0], history, layers, quantities)
    if all_layers:
        _draw_all(below[1], history, quantities)
    return figure


def _quantities(history: LoadHistory) -> list[_Quantity]:
    series = {name: history.series(name) for name in history.layers}
    relative = {name: load.tokens_E / load.tokens_E.mean(1, keepdim=True) for name, load in series.items()}
    hottest = min(max(2.0, _largest(relative)), _HOTTEST)
    found = [_Quantity("tokens / mean", relative, TwoSlopeNorm(1.0, 0.0, hottest), "RdBu_r")]
    dropped = {name: load.dropped_E / load.tokens_E.clamp(min=1) for name, load in series.items()}
    if largest := _largest(dropped):
        found.append(_Quantity("dropped share", dropped, Normalize(0.0, largest), "Reds"))
    biases = {name: load.bias_E for name, load in series.items() if not load.bias_E.isnan().any()}
    if biases:
        reach = _largest({name: bias.abs() for name, bias in biases.items()}) or 1.0
        found.append(_Quantity("bias of the router", biases, Normalize(-reach, reach), "PuOr"))
    return found


def _draw_imbalance(axes: Axes, history: LoadHistory) -> None:
    steps = [(column.first + column.last) / 2 for column in history.columns]
    few = len(history.layers) <= _PANELS
    for name in history.layers:
        values = [column.imbalance[name] for column in history.columns]
        axes.plot(steps, values, linewidth=1.0, alpha=0.8 if few else 0.25, label=name if few else None)
    table = np.array([[column.imbalance[name] for name in history.layers] for column in history.columns])
    known = ~np.isnan(table).all(1)
    mean = np.nanmean(table[known], 1)
    label = f"mean of all layers, at last {mean[-1]:.2f}" if mean.size else "mean"
    axes.plot(np.array(steps)[known], mean, color="black", linewidth=1.8, label=label)
    axes.axhline(1.0, color="0.4", linestyle="--", linewidth=1.0)
    axes.set(ylabel="busiest / mean", xlabel="optimizer step", xlim=_limits(history))
    axes.set_title("imbalance (1: every expert has the same)", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper right", ncols=2 if few and len(history.layers) > 3 else 1)


def _draw_layers(
    figure: SubFigure, history: LoadHistory, layers: Sequence[str], quantities: Sequence[_Quantity]
) -> None:
    grid = figure.subplots(
        len(layers),
        len(quantities),
        squeeze=False,
        sharex=True,
        height_ratios=[_height(history.layers[name]) for name in layers],
    )
    edges = [*(column.first - 0.5 for column in history.columns), history.columns[-1].last + 0.5]
    for place, quantity in enumerate(quantities):
        mesh = None
        for axes, name in zip(grid[:, place], layers, strict=True):
            experts = history.layers[name]
            if name not in quantity.of_layer:
                axes.set_axis_off()
                continue
            values = quantity.of_layer[name].T.numpy()
            borders = np.arange(experts + 1) - 0.5
            mesh = axes.pcolormesh(edges, borders, values, norm=quantity.norm, cmap=quantity.colours, rasterized=True)
            axes.set_facecolor("0.85")  # no tokens at all
            axes.set_yticks(_ticks(experts))
            axes.tick_params(labelsize=8)
            axes.invert_yaxis()
            if place == 0:
                axes.set_ylabel("expert", fontsize=8)
            axes.set_title(name if place == 0 else "", fontsize=9, loc="left")
        grid[-1, place].set_xlabel("optimizer step")
        if mesh is not None:
            extend = "max" if place == 0 and _largest(quantity.of_layer) > _HOTTEST else "neither"
            bar = figure.colorbar(mesh, ax=list(grid[:, place]), location="top", aspect=40, extend=extend)
            bar.set_label(quantity.title, fontsize=9)
            bar.ax.tick_params(labelsize=8)


def _draw_all(figure: SubFigure, history: LoadHistory, quantities: Sequence[_Quantity]) -> None:
    """All layers by experts, in the last column."""
    most = max(history.layers.values())
    last = history.columns[-1]
    steps = f"step {last.first}" if last.first == last.last else f"steps {last.first} to {last.last}"
    for place, (axes, quantity) in enumerate(
        zip(figure.subplots(1, len(quantities), squeeze=False)[0], quantities, strict=True)
    ):
        table = np.full((len(history.layers), most), math.nan)
        for row, (name, experts) in enumerate(history.layers.items()):
            if name in quantity.of_layer:
                table[row, :experts] = quantity.of_layer[name][-1].numpy()
        axes.imshow(table, norm=quantity.norm, cmap=quantity.colours, aspect="auto", interpolation="nearest")
        axes.set_title(f"{quantity.title}, {steps}", fontsize=9)
        axes.set(xlabel="expert", ylabel="layer with experts" if place == 0 else "")
        axes.tick_params(labelsize=8)


def _chosen(layers: list[str]) -> list[str]:
    if len(layers) <= _PANELS:
        return layers
    return [layers[round(i * (len(layers) - 1) / (_PANELS - 1))] for i in range(_PANELS)]


def _height(experts: int) -> float:
    return 0.75 + min(0.09 * experts, 1.2)


def _ratios(heights: Sequence[float], layers: int, all_layers: bool) -> list[float]:
    return [heights[0], sum(heights[1 : 1 + layers]) + 0.8, *(heights[-1:] if all_layers else [])]


def _ticks(experts: int) -> list[int]:
    step = max(1, math.ceil(experts / 4))
    return list(range(0, experts, step))


def _limits(history: LoadHistory) -> tuple[float, float]:
    return history.columns[0].first - 0.5, history.columns[-1].last + 0.5


def _largest(values: dict[str, Tensor]) -> float:
    return max((float(value.nan_to_num(0.0).max()) for value in values.values()), default=0.0)

"""The charts as pictures, with matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_5d.memory.categories import colours
from lightning_5d.memory.layout import SMALLEST, Layout
from lightning_5d.memory.record import Bytes
from lightning_5d.memory.summary import MemorySummary, readable, unit_for

_STRIP = {"gather": "0.93", "forward": "0.86", "backward": "0.72", "clip": "0.60", "step": "0.50", "evaluation": "0.90"}
_SHORT = {"gather": "", "forward": "fwd", "backward": "bwd", "clip": "", "step": "opt", "evaluation": "eval"}


def stacked(layout: Layout, title: str) -> Figure:
    """Bytes by category over the steps of one rank, stacked; a strip above names the phases."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    strip, axes = figure.subplots(2, 1, sharex=True, height_ratios=(1, 16))
    scale, unit = unit_for(layout.totals)
    colour = colours(layout.bands)
    if layout.x:
        stack = [[value / scale for value in values] for values in layout.bands.values()]
        axes.stackplot(
            layout.x, stack, labels=list(layout.bands), colors=[colour[name] for name in layout.bands], linewidth=0
        )
        axes.plot(layout.x, [total / scale for total in layout.totals], color="0.15", linewidth=0.7)
    for edge in range(len(layout.steps) + 1):
        axes.axvline(edge, color="0.35", linewidth=0.7, linestyle=":")
    ticks = {
        x: label + ("\nskipped" if layout.steps[int(x)] in layout.skipped else "")
        for x, label in layout.step_labels().items()
    }
    if layout.x and layout.x[0] < 0:
        ticks = {layout.x[0] / 2: "setup"} | ticks
    axes.set_xticks(list(ticks), list(ticks.values()), fontsize=13)
    axes.tick_params(axis="x", length=0)
    axes.tick_params(axis="y", labelsize=12)
    axes.set_ylabel(f"memory in {unit}", fontsize=14)
    axes.set_xlabel("optimizer step, its allocations in order", fontsize=14)
    axes.set_xlim(min(layout.x, default=0), max(layout.x, default=1))
    axes.set_ylim(0, max(layout.totals, default=1) / scale * 1.03 or 1)
    axes.grid(axis="y", alpha=0.35)
    axes.set_axisbelow(False)
    draw_strip(strip, layout)
    figure.suptitle(title, fontsize=15, x=0.01, ha="left")
    handles, labels = axes.get_legend_handles_labels()
    legend = figure.legend(
        handles[::-1], labels[::-1], loc="outside right center", fontsize=12, frameon=False, title="held as"
    )
    legend.get_title().set_fontsize(12)
    note = "Strip on top, from light to dark: gather, forward, backward, clip, optimizer step. " + layout.note()
    figure.supxlabel(note, fontsize=9.5, color="0.35", x=0.01, ha="left")
    return figure


def draw_strip(strip: Axes, layout: Layout) -> None:
    """A strip that names the phases."""
    strip.set_ylim(0, 1)
    for stretch in layout.stretches:
        if stretch.name in _STRIP:
            strip.axvspan(stretch.start, stretch.end, color=_STRIP[stretch.name], linewidth=0)
            width = (stretch.end - stretch.start) / (max(layout.x) - min(layout.x))
            if _SHORT[stretch.name] and width > 0.031:
                middle = (stretch.start + stretch.end) / 2
                strip.text(middle, 0.45, _SHORT[stretch.name], ha="center", va="center", fontsize=9)
    strip.set_axis_off()


def side_by_side(summary: MemorySummary, title: str) -> Figure:
    """What each rank held at the moment of its highest total, stacked, one bar a rank."""
    highest = max((peak.total for peak in summary.ranks), default=0)
    names = [
        name
        for name in summary.categories
        if any(peak.peak.get(name, 0) > SMALLEST * highest for peak in summary.ranks)
    ]
    figure = Figure(figsize=(max(7.5, 3.5 + 0.5 * len(summary.ranks)), 5.5), layout="constrained")
    axes = figure.subplots()
    scale, unit = unit_for([peak.total for peak in summary.ranks])
    positions = range(len(summary.ranks))
    bottoms = draw_bars(axes, positions, [peak.peak for peak in summary.ranks], names, scale)
    if len(summary.ranks) <= 16:
        for position, (peak, top) in enumerate(zip(summary.ranks, bottoms, strict=True)):
            axes.annotate(readable(peak.total), (position, top), (0, 3), textcoords="offset points", ha="center")
        axes.set_xticks(
            list(positions), [f"rank {p.rank}\n{p.phase} of step {p.step}" for p in summary.ranks], fontsize=11
        )
    else:
        axes.set_xlabel("rank", fontsize=13)
    axes.set_ylim(0, max(bottoms, default=1) * 1.08 or 1)
    axes.set_xlim(-0.6, len(summary.ranks) - 0.4)
    axes.set_ylabel(f"memory in {unit}, at the peak", fontsize=13)
    figure.suptitle(title, fontsize=14, x=0.01, ha="left")
    axes.grid(axis="y", alpha=0.35)
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", fontsize=11, frameon=False, title="held as")
    return figure


def draw_bars(
    axes: Axes, positions: Iterable[float], peaks: Sequence[Bytes], names: Sequence[str], scale: int
) -> list[float]:
    """Bars of stacked categories; returns where each ends."""
    colour = colours(names)
    bottoms = [0.0] * len(peaks)
    for name in names:
        heights = [peak.get(name, 0) / scale for peak in peaks]
        axes.bar(list(positions), heights, bottom=bottoms, color=colour[name], label=name, width=0.6)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    return bottoms

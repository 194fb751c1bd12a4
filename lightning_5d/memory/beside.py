"""Runs beside each other: the same step of each, on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_5d.memory.categories import colours, in_order
from lightning_5d.memory.chart_png import draw_bars, draw_strip
from lightning_5d.memory.layout import SMALLEST, layout_of
from lightning_5d.memory.record import Bytes, MemoryRecord
from lightning_5d.memory.summary import readable, unit_for


@dataclass(frozen=True)
class RecordedRun:
    """One run of those beside each other.

    Attributes:
        ranks: What each rank recorded in the step that is shown, in rank order.
        step: Its number.
    """

    ranks: tuple[MemoryRecord, ...]
    step: int

    @classmethod
    def load(cls, folder: Path) -> RecordedRun:
        """The last step that all ranks recorded.

        Raises:
            ValueError: If there is none.
        """
        records = [MemoryRecord.load(path) for path in folder.glob("memory_rank*.json")]
        records.sort(key=lambda record: record.rank)
        steps = [{point.step for point in record.points if point.step} for record in records]
        common = set.intersection(*steps) if steps else set()
        if not common:
            raise ValueError(
                f"{folder} has no step that all ranks recorded; MemoryProfiler writes memory_rankN.json, in its own folder."
            )
        step = max(common)
        return cls(tuple(_only(record, step) for record in records), step)

    @property
    def name(self) -> str:
        """What to call it."""
        return "one process" if len(self.ranks) == 1 else f"{len(self.ranks)} ranks"

    @property
    def peaks(self) -> list[Bytes]:
        """Bytes by category of each rank at the moment of its highest total."""
        return [record.peak() for record in self.ranks]

    @property
    def fullest(self) -> MemoryRecord:
        """The rank whose peak is highest."""
        return max(self.ranks, key=lambda record: sum(record.peak().values()))


def _only(record: MemoryRecord, step: int) -> MemoryRecord:
    """The part of a recording that belongs to a step."""
    points = [point for point in record.points if point.step == step]
    kept = sorted({point.phase for point in points})
    points = [replace(point, phase=kept.index(point.phase)) for point in points]
    return replace(record, phases=[record.phases[index] for index in kept], points=points)


def draw_beside(folders: Sequence[Path], path: Path, title: str) -> Path:
    """Draws the last recorded step of several runs, of each the rank that holds most, and the peaks of all ranks.

    Args:
        folders: What `MemoryProfiler` wrote in each run; the first is what the others are measured by.
        path: The PNG to write.
        title: Of the picture.

    Returns:
        `path`.

    Raises:
        ValueError: If a folder has no recorded step.
    """
    runs = [RecordedRun.load(folder) for folder in folders]
    peaks = [peak for run in runs for peak in run.peaks]
    highest = max(sum(peak.values()) for peak in peaks)
    scale, unit = unit_for([highest])
    names = in_order([name for peak in peaks for name in peak])
    names = [name for name in names if any(peak.get(name, 0) > SMALLEST * highest for peak in peaks)]
    bars = len(peaks) + len(runs)
    figure = Figure(figsize=(4.2 * len(runs) + 0.62 * bars + 1.6, 6.2), layout="constrained")
    grid = figure.subplots(
        2, len(runs) + 1, height_ratios=(1, 15), width_ratios=[4.2] * len(runs) + [0.62 * bars], squeeze=False
    )
    top = highest / scale * 1.1
    first = sum(runs[0].fullest.peak().values())
    for (strip, axes), run in zip(grid.T, runs, strict=False):
        _draw_step(strip, axes, run, names, scale, top)
        most = sum(run.fullest.peak().values())
        says = "" if run is runs[0] else f", {most / first:.0%} of {runs[0].name}"
        which = "" if len(run.ranks) == 1 else f", of which rank {run.fullest.rank} holds most"
        axes.set_title(f"{run.name}{which}", fontsize=13, loc="left", fontweight="bold")
        axes.set_xlabel(f"at most {readable(most)}{says}", fontsize=13, labelpad=8)
        axes.tick_params(axis="y", labelleft=run is runs[0])
    grid[1][0].set_ylabel(f"memory of one rank, in {unit}", fontsize=13)
    grid[0][-1].set_axis_off()
    _draw_peaks(grid[1][-1], runs, names, scale, top)
    figure.suptitle(title, fontsize=16, x=0.01, ha="left")
    handles, labels = grid[1][-1].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower left", ncols=len(names), fontsize=11, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _draw_step(strip: Axes, axes: Axes, run: RecordedRun, names: Sequence[str], scale: int, top: float) -> None:
    layout = layout_of(run.fullest)
    colour = colours(names)
    stack = [[value / scale for value in layout.bands.get(name, [0] * len(layout.x))] for name in names]
    axes.stackplot(layout.x, stack, colors=[colour[name] for name in names], linewidth=0)
    axes.plot(layout.x, [total / scale for total in layout.totals], color="0.15", linewidth=0.8)
    axes.set_xlim(min(layout.x), max(layout.x))
    strip.set_xlim(min(layout.x), max(layout.x))
    axes.set_ylim(0, top)
    axes.set_xticks([])
    axes.grid(axis="y", alpha=0.35)
    axes.set_axisbelow(False)
    draw_strip(strip, layout)


def _draw_peaks(axes: Axes, runs: Sequence[RecordedRun], names: Sequence[str], scale: int, top: float) -> None:
    positions: list[float] = []
    labels: list[str] = []
    for run in runs:
        start = positions[-1] + 1.5 if positions else 0.0
        positions += [start + index for index in range(len(run.ranks))]
        labels += ["one\nprocess"] if len(run.ranks) == 1 else [f"rank\n{record.rank}" for record in run.ranks]
    peaks = [peak for run in runs for peak in run.peaks]
    ends = draw_bars(axes, positions, peaks, names, scale)
    for position, end, peak in zip(positions, ends, peaks, strict=True):
        size = readable(sum(peak.values()), 0).split()[0]
        axes.annotate(size, (position, end), (0, 3), textcoords="offset points", ha="center", fontsize=11)
    axes.set_xticks(positions, labels, fontsize=11)
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, top)
    axes.tick_params(axis="y", labelleft=False)
    axes.grid(axis="y", alpha=0.35)
    axes.set_axisbelow(True)
    axes.set_title("every rank at its peak", fontsize=13, loc="left", fontweight="bold")

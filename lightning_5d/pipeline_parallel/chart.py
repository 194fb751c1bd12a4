"""Schedules as pictures: a row per rank, a box per action, on one clock."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from lightning_5d.pipeline_parallel.boxes import FONT, Scale, draw_rows, draw_table, legend_for, scale_for
from lightning_5d.pipeline_parallel.simulate import Simulation
from lightning_5d.pipeline_parallel.summary import number, summarize
from lightning_5d.pipeline_parallel.timeline import Timeline

_LEGEND_ENTRY = 2.0  # inches
_TITLE = 0.75


def draw_schedules(simulations: Sequence[Simulation]) -> Figure:
    """Draws schedules under each other on the same clock: one with its memory, several with a table that compares them.

    Boxes carry the number of their microbatch where the longest of these fits and can be read. Lighter boxes belong to later stages of a
    rank (in a bidirectional pipeline: to the second direction). Pairs that overlap are drawn above each other. Grey is bubble.

    Args:
        simulations: Schedules on the clock, at least one.

    Raises:
        ValueError: If there is none.
    """
    if not simulations:
        raise ValueError("There is no schedule to draw; give one or more.")
    scale = scale_for(simulations)
    below = 1.9 if len(simulations) == 1 else table_height(len(simulations))
    figure, (*rows, last) = figure_with_rows(simulations, scale, legend_for(simulations), below)
    for axes, simulation in zip(rows, simulations, strict=True):
        draw_rows(axes, simulation, scale, _title(simulation))
    if len(simulations) == 1:
        _draw_memory(last, simulations[0])
        rows[0].sharex(last)
        last.set_xlim(0, scale.until)
    else:
        rows[-1].set_xlabel(_clock(simulations), fontsize=FONT)
        draw_table(last, [summarize(simulation) for simulation in simulations])
    return figure


def figure_with_rows(
    timelines: Sequence[Timeline], scale: Scale, handles: Sequence[Patch], *below: float
) -> tuple[Figure, list[Axes]]:
    """A figure with a legend on top, room for the rows of each timeline, and further panels under them.

    Args:
        timelines: What will be drawn into the first axes, in this order.
        scale: Of all of them.
        handles: Of the legend.
        below: Heights of the panels under them, in inches.
    """
    heights = [timeline.schedule.ranks * scale.row + _TITLE for timeline in timelines] + list(below)
    columns = min(len(handles), int(scale.width / _LEGEND_ENTRY))
    legend = 0.3 + 0.2 * -(-len(handles) // columns)
    figure = Figure(figsize=(scale.width, sum(heights) + legend), layout="constrained")
    panels = figure.subplots(len(heights), height_ratios=heights, squeeze=False)[:, 0]
    figure.legend(
        handles=list(handles),
        loc="outside upper center",
        ncols=columns,
        frameon=False,
        fontsize=FONT,
        handlelength=1.2,
    )
    return figure, list(panels)


def table_height(rows: int) -> float:
    """Of `draw_table`, in inches."""
    return 0.55 + 0.24 * rows


def _draw_memory(axes: Axes, simulation: Simulation) -> None:
    """How many activations each rank keeps over time."""
    ranks = simulation.schedule.ranks
    peaks = simulation.peak_activations
    worst = peaks.index(max(peaks))
    others = [rank for rank in range(ranks) if rank != worst]
    for rank in (*others, worst):
        times, lives = live_curve(simulation, rank)
        if rank == worst:
            most = f"rank {rank}, the first\nwith the most: {number(peaks[rank])}"
            axes.step(times, lives, where="post", label=most, color="#a02c5a", linewidth=2)
        else:
            label = "other ranks" if rank == others[0] else None
            axes.step(times, lives, where="post", label=label, color="0.6", linewidth=0.8)
    finish_memory(axes, max(peaks), _clock([simulation]))


def live_curve(timeline: Timeline, rank: int) -> tuple[list[float], list[float]]:
    """The corners of a rank's live activations over the whole clock: times, and how many from there on."""
    steps = timeline.live_activations(rank)
    times = [0.0, *(time for time, _ in steps), timeline.makespan]
    return times, [0.0, *(live for _, live in steps), steps[-1][1] if steps else 0.0]


def finish_memory(axes: Axes, most: float, clock: str) -> None:
    """Axes, labels and legend of a panel with live activations."""
    axes.set_ylim(0, most * 1.12 + 0.2)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    axes.set_ylabel("live activations\n(microbatches)", fontsize=FONT)
    axes.set_xlabel(clock, fontsize=FONT)
    axes.tick_params(labelsize=FONT - 0.5)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=FONT - 0.5, frameon=False, handlelength=1.0, borderpad=0
    )


def _clock(simulations: Sequence[Simulation]) -> str:
    """The label of the time axis, with what an action takes."""
    durations = {simulation.durations for simulation in simulations}
    if len(durations) > 1:
        return "time"
    return f"time; {durations.pop()}"


def _title(simulation: Simulation) -> str:
    schedule = simulation.schedule
    return f"{schedule.title}: {bubble_text(simulation)}, peak {number(max(simulation.peak_activations))} microbatches"


def bubble_text(timeline: Timeline) -> str:
    """The bubble in words, also with a barrier where that makes a difference."""
    bubble = f"bubble {timeline.bubble_ratio:.1%}"
    if timeline.bubble_ratio_with_barrier - timeline.bubble_ratio > 1e-9:
        bubble += f" ({timeline.bubble_ratio_with_barrier:.1%} with a barrier after each step)"
    return bubble

"""Schedules as pictures: a row per rank, a box per action, on one clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from lightning_5d.pipeline_parallel.schedule import Action, Kind, Schedule, actions_of
from lightning_5d.pipeline_parallel.simulate import Simulation, Span
from lightning_5d.pipeline_parallel.summary import COLUMNS, number, summarize

COLOURS = {
    Kind.FORWARD: "#2f6fc4",
    Kind.BACKWARD: "#2e9a4f",
    Kind.INPUT_GRADIENT: "#12a5a5",
    Kind.WEIGHT_GRADIENT: "#e39a1c",
}
"""Blue forward and green backward are the field's; the halves of a split backward are teal and amber."""

BUBBLE = "#e6e6e6"
WORDS = {
    Kind.FORWARD: "forward (F)",
    Kind.BACKWARD: "backward (BW)",
    Kind.INPUT_GRADIENT: "input gradient (B)",
    Kind.WEIGHT_GRADIENT: "weight gradient (W)",
}

_SIDE = 2.5  # inches beside the boxes: labels of ranks, bubble and peak
_WIDEST = 30.0
_LEGEND_ENTRY = 2.0  # inches
_BOX_HEIGHT = 0.86  # of a row
_FONT = 10.5
_READABLE_FONT = 8.0  # also at half the size
_SMALLEST_FONT = 5.5
_DIGIT = 0.65  # width of a digit, of the font's size


@dataclass(frozen=True)
class _Scale:
    """How large things get on paper.

    Attributes:
        inches: Of one unit of time.
        row: Height of a rank, in inches.
        width: Of the figure, in inches.
    """

    inches: float
    row: float
    width: float

    def font_for(self, digits: int, duration: float, height: float) -> float | None:
        """The size in points at which a number fits into a box, or none if it would be too small to read."""
        wide = 0.92 * duration * self.inches * 72 / (_DIGIT * digits)
        high = 0.8 * height * self.row * 72
        size = min(_FONT, wide, high)
        return size if size >= _SMALLEST_FONT else None


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
    scale = _scale(simulations)
    heights = [simulation.schedule.ranks * scale.row + 0.75 for simulation in simulations]
    below = 1.9 if len(simulations) == 1 else 0.55 + 0.24 * len(simulations)
    handles = _legend(simulations)
    columns = min(len(handles), int(scale.width / _LEGEND_ENTRY))
    legend = 0.3 + 0.2 * -(-len(handles) // columns)
    figure = Figure(figsize=(scale.width, sum(heights) + below + legend), layout="constrained")
    panels = figure.subplots(len(simulations) + 1, height_ratios=[*heights, below], squeeze=False)[:, 0]
    until = max(simulation.makespan for simulation in simulations) or 1.0
    for axes, simulation in zip(panels, simulations, strict=False):
        _draw_rows(axes, simulation, scale, until)
    if len(simulations) == 1:
        _draw_memory(panels[-1], simulations[0])
        panels[0].sharex(panels[-1])
        panels[-1].set_xlim(0, until)
    else:
        panels[-2].set_xlabel(_clock(simulations), fontsize=_FONT)
        _draw_table(panels[-1], simulations)
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=columns,
        frameon=False,
        fontsize=_FONT,
        handlelength=1.2,
    )
    return figure


def _scale(simulations: Sequence[Simulation]) -> _Scale:
    until = max(simulation.makespan for simulation in simulations) or 1.0
    shortest = min(map(_shortest, simulations))
    digits = max(len(str(simulation.schedule.microbatches - 1)) for simulation in simulations)
    box = 0.08 + digits * _DIGIT * _READABLE_FONT / 72
    width = min(_WIDEST, max(10.0, _SIDE + until * box / shortest))
    most_ranks = max(simulation.schedule.ranks for simulation in simulations)
    row = 0.36 if most_ranks <= 8 else 0.29
    return _Scale((width - _SIDE) / until, row, width)


def _shortest(simulation: Simulation) -> float:
    lengths = (span.end - span.start for spans in simulation.timeline for span in spans)
    return min((length for length in lengths if length > 0), default=1.0)


def _draw_rows(axes: Axes, simulation: Simulation, scale: _Scale, until: float) -> None:
    schedule = simulation.schedule
    shortest = _shortest(simulation)
    digits = len(str(schedule.microbatches - 1))
    boxes: dict[tuple[Kind, int], list[list[tuple[float, float]]]] = defaultdict(list)
    for rank, spans in enumerate(simulation.timeline):
        axes.barh(rank, simulation.makespan, height=_BOX_HEIGHT, color=BUBBLE, linewidth=0)
        for span in spans:
            for action, top, height in _parts(span, rank):
                shade = _shade(schedule, rank, action)
                bottom = top + height
                boxes[action.kind, shade].append(
                    [(span.start, top), (span.end, top), (span.end, bottom), (span.start, bottom)]
                )
                # All boxes of a size show their number, or none does: some with and some without would read as a difference.
                if font := scale.font_for(digits, span.end - span.start, height):
                    ink = _contrast(_colour(action.kind, shade, _shades(schedule)))
                    axes.text(
                        (span.start + span.end) / 2, top + height / 2, str(action.microbatch),
                        ha="center", va="center", fontsize=font, color=ink,
                    )  # fmt: skip
    edge = 0.5 if scale.font_for(digits, shortest, _BOX_HEIGHT) else 0.0
    for (kind, shade), corners in boxes.items():
        colour = _colour(kind, shade, _shades(schedule))
        axes.add_collection(PolyCollection(corners, facecolor=colour, edgecolor="white", linewidth=edge))
    peaks = simulation.peak_activations
    for rank in range(schedule.ranks):
        note = f"{number(simulation.bubble[rank])} | {number(peaks[rank])}"
        axes.annotate(
            note, (1, rank), xycoords=("axes fraction", "data"), xytext=(6, 0), textcoords="offset points",
            va="center", fontsize=_FONT - 0.5, color="0.25", annotation_clip=False,
        )  # fmt: skip
    axes.annotate(
        "bubble | peak", (1, 1), xycoords="axes fraction", xytext=(6, 4), textcoords="offset points",
        fontsize=_FONT - 0.5, color="0.25", annotation_clip=False,
    )  # fmt: skip
    axes.set_title(_title(simulation), loc="left", fontsize=_FONT + 1.5)
    axes.set_xlim(0, until)
    axes.set_ylim(schedule.ranks - 0.5, -0.5)
    axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)], fontsize=_FONT)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=_FONT - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_memory(axes: Axes, simulation: Simulation) -> None:
    """How many activations each rank keeps over time."""
    ranks = simulation.schedule.ranks
    peaks = simulation.peak_activations
    worst = peaks.index(max(peaks))
    others = [rank for rank in range(ranks) if rank != worst]
    for rank in (*others, worst):
        steps = simulation.live_activations(rank)
        times = [0.0, *(time for time, _ in steps), simulation.makespan]
        lives = [0.0, *(live for _, live in steps), steps[-1][1] if steps else 0.0]
        if rank == worst:
            most = f"rank {rank}, the first\nwith the most: {number(peaks[rank])}"
            axes.step(times, lives, where="post", label=most, color="#a02c5a", linewidth=2)
        else:
            label = "other ranks" if rank == others[0] else None
            axes.step(times, lives, where="post", label=label, color="0.6", linewidth=0.8)
    axes.set_ylim(0, max(peaks) * 1.12 + 0.2)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    axes.set_ylabel("live activations\n(microbatches)", fontsize=_FONT)
    axes.set_xlabel(_clock([simulation]), fontsize=_FONT)
    axes.tick_params(labelsize=_FONT - 0.5)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=_FONT - 0.5, frameon=False, handlelength=1.0, borderpad=0
    )


def _draw_table(axes: Axes, simulations: Sequence[Simulation]) -> None:
    axes.axis("off")
    cells = [list(summarize(simulation)) for simulation in simulations]
    table = axes.table(
        cells, colLabels=list(COLUMNS), cellLoc="center", colLoc="center", bbox=Bbox.from_bounds(0, 0, 1, 0.9)
    )
    table.auto_set_font_size(False)
    table.set_fontsize(_FONT)
    for (row, column), cell in table.get_celld().items():
        cell.set_edgecolor("0.8")
        if row == 0:
            cell.set_text_props(weight="bold")
        if column == 0:
            cell.set_text_props(ha="left")


def _clock(simulations: Sequence[Simulation]) -> str:
    """The label of the time axis, with what an action takes."""
    durations = {simulation.durations for simulation in simulations}
    if len(durations) > 1:
        return "time"
    return f"time; {durations.pop()}"


def _legend(simulations: Sequence[Simulation]) -> list[Patch]:
    kinds = {
        action.kind
        for simulation in simulations
        for spans in simulation.timeline
        for span in spans
        for action in actions_of(span.entry)
    }
    handles = [Patch(color=COLOURS[kind], label=WORDS[kind]) for kind in COLOURS if kind in kinds]
    shades = max(_shades(simulation.schedule) for simulation in simulations)
    if shades > 1:
        two_ways = all(
            len(simulation.schedule.placement) > 1 for simulation in simulations if _shades(simulation.schedule) > 1
        )
        what = "second direction" if two_ways else "later stage of the rank"
        handles.append(Patch(color=_colour(Kind.FORWARD, 1, 2), label=f"lighter: {what}"))
    return [*handles, Patch(color=BUBBLE, label="bubble")]


def _title(simulation: Simulation) -> str:
    schedule = simulation.schedule
    bubble = f"bubble {simulation.bubble_ratio:.1%}"
    if simulation.bubble_ratio_with_barrier - simulation.bubble_ratio > 1e-9:
        bubble += f" ({simulation.bubble_ratio_with_barrier:.1%} with a barrier after each step)"
    return f"{schedule.title}: {bubble}, peak {number(max(simulation.peak_activations))} microbatches"


def _parts(span: Span, rank: int) -> list[tuple[Action, float, float]]:
    """The actions of a span with the top and the height of their boxes."""
    actions = actions_of(span.entry)
    height = _BOX_HEIGHT / len(actions)
    return [(action, rank - _BOX_HEIGHT / 2 + index * height, height) for index, action in enumerate(actions)]


def _shade(schedule: Schedule, rank: int, action: Action) -> int:
    copy = schedule.copies[action.microbatch]
    if len(schedule.placement) > 1:
        return copy
    return schedule.stages_of(rank).index(action.stage)


def _shades(schedule: Schedule) -> int:
    return max(len(schedule.placement), schedule.stages // schedule.ranks)


def _colour(kind: Kind, shade: int, shades: int) -> tuple[float, float, float]:
    light = 0.6 * shade / max(1, shades - 1)
    red, green, blue = (part + (1 - part) * light for part in to_rgb(COLOURS[kind]))
    return red, green, blue


def _contrast(colour: tuple[float, float, float]) -> str:
    red, green, blue = colour
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.58 else "black"

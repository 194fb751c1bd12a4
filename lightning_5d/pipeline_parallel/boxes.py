"""The parts of pipeline charts: rows of boxes, their legend, and the table under them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from lightning_5d.pipeline_parallel.colours import (
    BUBBLE,
    COLOURS,
    WORDS,
    colour_of,
    ink_on,
    shade_of,
    shades_of,
)
from lightning_5d.pipeline_parallel.schedule import Action, Kind, actions_of
from lightning_5d.pipeline_parallel.summary import COLUMNS, number
from lightning_5d.pipeline_parallel.timeline import Span, Timeline

FONT = 10.5

_SIDE = 2.5  # inches beside the boxes: labels of ranks, bubble and peak
_WIDEST = 30.0
_BOX_HEIGHT = 0.86  # of a row
_READABLE_FONT = 8.0  # also at half the size
_SMALLEST_FONT = 5.5
_DIGIT = 0.65  # width of a digit, of the font's size


@dataclass(frozen=True)
class Scale:
    """How large things get on paper.

    Attributes:
        until: The end of the clock.
        inches: Of one unit of time.
        row: Height of a rank, in inches.
        width: Of the figure, in inches.
    """

    until: float
    inches: float
    row: float
    width: float

    def font_for(self, digits: int, duration: float, height: float) -> float | None:
        """The size in points at which a number fits into a box, or none if it would be too small to read."""
        wide = 0.92 * duration * self.inches * 72 / (_DIGIT * digits)
        high = 0.8 * height * self.row * 72
        size = min(FONT, wide, high)
        return size if size >= _SMALLEST_FONT else None


def scale_for(timelines: Sequence[Timeline], shortest: float | None = None) -> Scale:
    """The scale at which the shortest box can hold its number, if that is not too wide.

    Args:
        timelines: All that go under each other.
        shortest: Duration of the shortest box that has to be readable; of all of them if ``None``.
    """
    until = max(timeline.makespan for timeline in timelines) or 1.0
    shortest = shortest or min(map(shortest_of, timelines))
    digits = max(len(str(timeline.schedule.microbatches - 1)) for timeline in timelines)
    box = 0.08 + digits * _DIGIT * _READABLE_FONT / 72
    width = min(_WIDEST, max(10.0, _SIDE + until * box / shortest))
    most_ranks = max(timeline.schedule.ranks for timeline in timelines)
    row = 0.36 if most_ranks <= 8 else 0.29
    return Scale(until, (width - _SIDE) / until, row, width)


def shortest_of(timeline: Timeline) -> float:
    """Duration of its shortest box that has any."""
    lengths = (span.end - span.start for spans in timeline.timeline for span in spans)
    return min((length for length in lengths if length > 0), default=1.0)


def draw_rows(
    axes: Axes,
    timeline: Timeline,
    scale: Scale,
    title: str,
    *,
    shortest: float | None = None,
    behind: Sequence[Sequence[tuple[float, float, str]]] = (),
    unit: str = "",
) -> None:
    """Draws a row per rank, a box per action.

    Args:
        axes: Where to draw.
        timeline: What to draw.
        scale: As of all rows on this clock.
        title: Above the rows.
        shortest: Duration from which on boxes have edges; that of the shortest box if ``None``.
        behind: For each rank, stretches between its boxes in colours of their own: start, end, colour.
        unit: Of the clock, if it has one.
    """
    schedule = timeline.schedule
    digits = len(str(schedule.microbatches - 1))
    shades = shades_of(schedule)
    boxes: dict[tuple[Kind, int], list[list[tuple[float, float]]]] = defaultdict(list)
    for rank, spans in enumerate(timeline.timeline):
        axes.barh(rank, timeline.makespan, height=_BOX_HEIGHT, color=BUBBLE, linewidth=0)
        for span in spans:
            for action, top, height in _parts(span, rank):
                shade = shade_of(schedule, rank, action)
                bottom = top + height
                boxes[action.kind, shade].append(
                    [(span.start, top), (span.end, top), (span.end, bottom), (span.start, bottom)]
                )
                # All boxes of a size show their number, or none does: some with and some without would read as a difference.
                if font := scale.font_for(digits, span.end - span.start, height):
                    ink = ink_on(colour_of(action.kind, shade, shades))
                    axes.text(
                        (span.start + span.end) / 2, top + height / 2, str(action.microbatch),
                        ha="center", va="center", fontsize=font, color=ink,
                    )  # fmt: skip
    for rank, stretches in enumerate(behind):
        for start, end, colour in stretches:
            axes.barh(rank, end - start, left=start, height=_BOX_HEIGHT, color=colour, linewidth=0)
    edge = 0.5 if scale.font_for(digits, shortest or shortest_of(timeline), _BOX_HEIGHT) else 0.0
    for (kind, shade), corners in boxes.items():
        colour = colour_of(kind, shade, shades)
        axes.add_collection(PolyCollection(corners, facecolor=colour, edgecolor="white", linewidth=edge))
    peaks = timeline.peak_activations
    for rank in range(schedule.ranks):
        note = f"{number(timeline.bubble[rank])} | {number(peaks[rank])}"
        axes.annotate(
            note, (1, rank), xycoords=("axes fraction", "data"), xytext=(6, 0), textcoords="offset points",
            va="center", fontsize=FONT - 0.5, color="0.25", annotation_clip=False,
        )  # fmt: skip
    axes.annotate(
        f"bubble in {unit} | peak" if unit else "bubble | peak", (1, 1), xycoords="axes fraction", xytext=(6, 4), textcoords="offset points",
        fontsize=FONT - 0.5, color="0.25", annotation_clip=False,
    )  # fmt: skip
    axes.set_title(title, loc="left", fontsize=FONT + 1.5)
    axes.set_xlim(0, scale.until)
    axes.set_ylim(schedule.ranks - 0.5, -0.5)
    axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)], fontsize=FONT)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=FONT - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=scale.until >= 4))
    axes.spines[["top", "right", "left"]].set_visible(False)


def draw_table(axes: Axes, rows: Sequence[Sequence[str]]) -> None:
    """Draws the texts of `summarize` as a table, a row for each."""
    axes.axis("off")
    cells = [list(row) for row in rows]
    table = axes.table(
        cells, colLabels=list(COLUMNS), cellLoc="center", colLoc="center", bbox=Bbox.from_bounds(0, 0, 1, 0.9)
    )
    table.auto_set_font_size(False)
    table.set_fontsize(FONT)
    for (row, column), cell in table.get_celld().items():
        cell.set_edgecolor("0.8")
        if row == 0:
            cell.set_text_props(weight="bold")
        if column == 0:
            cell.set_text_props(ha="left")


def legend_for(timelines: Sequence[Timeline]) -> list[Patch]:
    """An entry for each kind of action, one for lighter shades and one for bubble, where there are such."""
    kinds = {
        action.kind
        for timeline in timelines
        for spans in timeline.timeline
        for span in spans
        for action in actions_of(span.entry)
    }
    handles = [Patch(color=COLOURS[kind], label=WORDS[kind]) for kind in COLOURS if kind in kinds]
    shaded = [timeline.schedule for timeline in timelines if shades_of(timeline.schedule) > 1]
    if shaded:
        two_ways = all(len(schedule.placement) > 1 for schedule in shaded)
        what = "second direction" if two_ways else "later stage of the rank"
        handles.append(Patch(color=colour_of(Kind.FORWARD, 1, 2), label=f"lighter: {what}"))
    return [*handles, Patch(color=BUBBLE, label="bubble")]


def _parts(span: Span, rank: int) -> list[tuple[Action, float, float]]:
    """The actions of a span with the top and the height of their boxes."""
    actions = actions_of(span.entry)
    height = _BOX_HEIGHT / len(actions)
    return [(action, rank - _BOX_HEIGHT / 2 + index * height, height) for index, action in enumerate(actions)]

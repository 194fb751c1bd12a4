"""Schedules as text, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from lightning_5d.pipeline_parallel.schedule import Action, Kind, Schedule, actions_of
from lightning_5d.pipeline_parallel.simulate import Simulation
from lightning_5d.pipeline_parallel.summary import number
from lightning_5d.pipeline_parallel.timeline import Span

STYLES = {
    Kind.FORWARD: "white on blue",
    Kind.BACKWARD: "white on green",
    Kind.INPUT_GRADIENT: "black on cyan",
    Kind.WEIGHT_GRADIENT: "black on yellow",
}


def chart_text(simulation: Simulation, width: int | None = None) -> Text:
    """Draws a schedule with a line per rank, time from left to right.

    A box begins with its letter, F, B (fused or not) or W, and its microbatch, and goes on in dashes as long as it lasts; dots
    are bubble. Small letters belong to later stages of a rank, or to the second direction. A pair that overlaps is drawn
    one after the other. Where that is too wide, boxes shrink to their letter; where that is too wide as well, boxes are left
    out, and a last line says so.

    Args:
        simulation: A schedule on the clock.
        width: Characters that a line may have; as many as it takes if none is given.

    Returns:
        A text whose colours a terminal shows and a file leaves out.
    """
    schedule = simulation.schedule
    unit = min(
        (
            (span.end - span.start) / len(actions_of(span.entry))
            for spans in simulation.timeline
            for span in spans
            if span.end > span.start
        ),
        default=1.0,
    )
    labels = [f"rank {rank} " for rank in range(schedule.ranks)]
    margin = max(map(len, labels))
    notes = [
        f" bubble {number(bubble)}, peak {number(peak)}"
        for bubble, peak in zip(simulation.bubble, simulation.peak_activations, strict=True)
    ]
    beside = margin + max(map(len, notes))
    units = max(1, round(simulation.makespan / unit))
    digits = len(str(schedule.microbatches - 1))
    widths = [units * cell for cell in (digits + 2, digits + 1, 1)]
    space = widths[0] if width is None else max(20, width - beside)
    columns = next((columns for columns in widths if columns <= space), space)
    per_time = columns / simulation.makespan if simulation.makespan else 1.0
    text = Text(no_wrap=True)
    for rank, spans in enumerate(simulation.timeline):
        text.append(labels[rank].ljust(margin))
        cursor = 0
        for action, start, end in _boxes(spans):
            first = max(cursor, round(start * per_time))
            last = max(first, round(end * per_time))
            text.append("." * (first - cursor), style="bright_black")
            label = _label(schedule, rank, action, numbered=columns >= widths[1])
            text.append(_fit(label, last - first), style=STYLES[action.kind])
            cursor = last
        text.append("." * max(0, columns - cursor), style="bright_black")
        text.append(notes[rank] + "\n")
    if columns < widths[-1]:
        text.append(
            f"Not every box fits: that takes {widths[-1] + beside} columns, and {widths[1] + beside} with numbers.\n"
        )
    return text


def _boxes(spans: tuple[Span, ...]) -> Iterator[tuple[Action, float, float]]:
    """Every action with the time it is drawn at; those of a pair share the pair's."""
    for span in spans:
        actions = actions_of(span.entry)
        share = (span.end - span.start) / len(actions)
        for index, action in enumerate(actions):
            yield action, span.start + index * share, span.start + (index + 1) * share


def _label(schedule: Schedule, rank: int, action: Action, *, numbered: bool) -> str:
    both_ways = len(schedule.placement) > 1
    later = schedule.copies[action.microbatch] if both_ways else schedule.stages_of(rank).index(action.stage)
    letter = action.kind.value[0].lower() if later else action.kind.value[0]
    return f"{letter}{action.microbatch}" if numbered else letter


def _fit(label: str, length: int) -> str:
    """A label in a box of so many characters; one with a number that does not fill the box ends in a blank."""
    if length <= len(label):
        return label if length == len(label) else label[: min(1, length)].ljust(length, "-")
    return label.ljust(length - 1, "-") + " " if len(label) > 1 else label.ljust(length, "-")

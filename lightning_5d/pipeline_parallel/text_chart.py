"""Schedules as text, for a terminal."""

from __future__ import annotations

from rich.text import Text

from lightning_5d.pipeline_parallel.schedule import Action, Kind, Schedule, actions_of
from lightning_5d.pipeline_parallel.simulate import Simulation, Span
from lightning_5d.pipeline_parallel.summary import number

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
    text = Text(no_wrap=True)
    for rank, spans in enumerate(simulation.timeline):
        text.append(labels[rank].ljust(margin))
        _append_row(text, schedule, rank, spans, columns / simulation.makespan if simulation.makespan else 1.0, columns)
        text.append(notes[rank] + "\n")
    if columns < widths[-1]:
        text.append(
            f"Not every box fits: that takes {widths[-1] + beside} columns, and {widths[1] + beside} with numbers.\n"
        )
    return text


def _append_row(
    text: Text, schedule: Schedule, rank: int, spans: tuple[Span, ...], per_time: float, columns: int
) -> None:
    cursor = 0
    for span in spans:
        actions = actions_of(span.entry)
        share = (span.end - span.start) / len(actions)
        for index, action in enumerate(actions):
            start = max(cursor, round((span.start + index * share) * per_time))
            end = max(start, round((span.start + (index + 1) * share) * per_time))
            text.append("." * (start - cursor), style="bright_black")
            text.append(_box(schedule, rank, action, end - start), style=STYLES[action.kind])
            cursor = end
    text.append("." * max(0, columns - cursor), style="bright_black")


def _box(schedule: Schedule, rank: int, action: Action, length: int) -> str:
    later = (
        schedule.copies[action.microbatch]
        if len(schedule.placement) > 1
        else schedule.stages_of(rank).index(action.stage)
    )
    letter = str(action.kind)[0]
    label = (letter.lower() if later else letter) + str(action.microbatch)
    if length == len(label):
        return label
    if length < len(label):
        return label[: min(1, length)].ljust(length, "-")
    return label.ljust(length - 1, "-") + " "

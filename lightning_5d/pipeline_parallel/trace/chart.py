"""A step as it was planned and as it ran, under each other on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightning_5d.pipeline_parallel.boxes import FONT, draw_rows, draw_table, legend_for, scale_for
from lightning_5d.pipeline_parallel.chart import figure_with_rows, finish_memory, live_curve, table_height
from lightning_5d.pipeline_parallel.summary import number, summarize
from lightning_5d.pipeline_parallel.timeline import Timeline
from lightning_5d.pipeline_parallel.trace.recorder import RECEIVE, SEND
from lightning_5d.pipeline_parallel.trace.step import Measured, StepTrace
from lightning_5d.pipeline_parallel.trace.units import spans_in, unit_for

WAITING = {RECEIVE: "#c2c2c2", SEND: "#8f8f8f"}
"""Bubble that has a reason is a darker grey."""

_MEMORY = 1.9  # inches
_VISIBLE = 1 / 500  # of the clock
_PLANNED, _ACTUAL = "0.55", "#a02c5a"


def draw_step(trace: StepTrace) -> Figure:
    """Draws the planned and the actual step, the activations of the rank that kept most, and a table that compares them.

    The plan is the schedule simulated with each stage's mean times, so that whatever the actual rows have more of is waiting for
    messages, unevenness between microbatches, and what the executor costs.
    """
    per_second, unit = unit_for(max(trace.actual.makespan, trace.planned.makespan))
    planned = replace(trace.planned, timeline=spans_in(trace.planned, per_second))
    live = tuple(tuple((time * per_second, count) for time, count in steps) for steps in trace.actual.live)
    actual = replace(trace.actual, timeline=spans_in(trace.actual, per_second), live=live)
    shortest = _short(planned)
    scale = scale_for([planned, actual], shortest)
    behind = [
        [(gap.start * per_second, gap.end * per_second, WAITING[gap.doing]) for gap in trace.idle(rank) if gap.doing]
        for rank in range(trace.schedule.ranks)
    ]
    handles = legend_for([planned, actual])
    doing = {colour for stretches in behind for start, end, colour in stretches if end - start > _VISIBLE * scale.until}
    words = {RECEIVE: "waiting for a message", SEND: "sending"}
    handles += [Patch(color=WAITING[kind], label=words[kind]) for kind in WAITING if WAITING[kind] in doing]
    figure, (above, below, memory, table) = figure_with_rows(
        [planned, actual], scale, handles, _MEMORY, table_height(2)
    )
    draw_rows(above, planned, scale, f"{trace.schedule.title}, planned: bubble {planned.bubble_ratio:.1%}", unit=unit)
    draw_rows(
        below, actual, scale, f"as it ran in step {trace.step}, on the same clock: bubble {actual.bubble_ratio:.1%}",
        shortest=shortest, behind=behind, unit=unit,
    )  # fmt: skip
    _draw_memory(memory, planned, actual, f"time in {unit}{_error(trace)}")
    for axes in (above, below):
        axes.sharex(memory)
    memory.set_xlim(0, scale.until)
    draw_table(
        table,
        [
            ("planned", *summarize(planned)[1:2], *_times(planned, unit)),
            ("as it ran", *summarize(actual)[1:2], *_times(actual, unit)),
        ],
    )
    return figure


def _short(timeline: Timeline) -> float | None:
    """Duration of a box of which three quarters are longer: a stage with little to do should not make the picture wide."""
    lengths = sorted(span.end - span.start for spans in timeline.timeline for span in spans)
    return lengths[len(lengths) // 4] if lengths and lengths[len(lengths) // 4] > 0 else None


def _draw_memory(axes: Axes, planned: Timeline, actual: Measured, clock: str) -> None:
    peaks = actual.peak_activations
    worst = peaks.index(max(peaks))
    calm = tuple(
        without_blinks(actual.live_activations(rank), _VISIBLE * actual.makespan) for rank in range(len(peaks))
    )
    actual = replace(actual, live=calm)
    for timeline, label, colour, width in (
        (planned, "planned", _PLANNED, 1.2),
        (actual, "as it ran", _ACTUAL, 2.0),
    ):
        times, lives = live_curve(timeline, worst)
        peak = number(timeline.peak_activations[worst])
        style = "--" if timeline is planned else "-"
        axes.step(
            times,
            lives,
            style,
            where="post",
            label=f"rank {worst}, {label}:\nat most {peak}",
            color=colour,
            linewidth=width,
        )
    finish_memory(axes, max(peaks), clock)
    axes.xaxis.label.set_fontsize(FONT)


def without_blinks(steps: Sequence[tuple[float, float]], shortest: float) -> tuple[tuple[float, float], ...]:
    """Steps without those that end in less than a given time by going up: between the end of a backward and the next forward."""
    following = [*steps[1:], (float("inf"), 0.0)]
    return tuple(
        (time, live)
        for (time, live), (until, then) in zip(steps, following, strict=True)
        if until - time >= shortest or then < live
    )


def _times(timeline: Timeline, unit: str) -> tuple[str, ...]:
    period, bubble, *ratios = summarize(timeline)[2:]
    return (f"{period} {unit}", f"{bubble} {unit}", *ratios)


def _error(trace: StepTrace) -> str:
    return f"; clocks of hosts agree to {trace.clock_error * 1e6:.0f} µs" if trace.clock_error else ""

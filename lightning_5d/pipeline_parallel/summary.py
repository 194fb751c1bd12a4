"""What a schedule costs, in a line of words."""

from __future__ import annotations

from lightning_5d.pipeline_parallel.timeline import Timeline

COLUMNS = ("schedule", "stages", "step time", "bubble", "of the step", "with barrier", "peak")
"""What `summarize` gives: times in the unit of the durations, the bubble also as a share of the step (without and with a barrier
after it), the most activations in microbatches of 1/ranks of the model."""


def summarize(timeline: Timeline) -> tuple[str, ...]:
    """The texts of `COLUMNS`; where ranks differ, that of the worst."""
    schedule = timeline.schedule
    return (
        schedule.name,
        str(schedule.stages),
        number(timeline.period),
        number(max(timeline.bubble)),
        f"{timeline.bubble_ratio:.1%}",
        f"{timeline.bubble_ratio_with_barrier:.1%}",
        number(max(timeline.peak_activations)),
    )


def number(value: float) -> str:
    """A number with at most two places after the point."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if abs(value) >= 0.005 else "0"

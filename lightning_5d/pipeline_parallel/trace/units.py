"""A unit in which the times of a step are easy to read."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from lightning_5d.pipeline_parallel.timeline import Span, Timeline

AnyTimeline = TypeVar("AnyTimeline", bound=Timeline)


def unit_for(seconds: float) -> tuple[float, str]:
    """How many of a unit are a second, and its name, for a step that takes so long."""
    return (1.0, "s") if seconds >= 10 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")


def spans_in(timeline: Timeline, per_second: float) -> tuple[tuple[Span, ...], ...]:
    """The spans of a timeline in another unit than seconds."""
    return tuple(
        tuple(replace(span, start=span.start * per_second, end=span.end * per_second) for span in spans)
        for spans in timeline.timeline
    )

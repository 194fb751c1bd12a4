"""What the charts of one rank show, as numbers: the same for the PNG and the HTML."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_5d.memory.record import MemoryRecord
from lightning_5d.memory.summary import readable

SMALLEST = 0.002
"""A band thinner than this share of the chart's height cannot be seen."""


@dataclass(frozen=True)
class Stretch:
    """One phase on the horizontal axis."""

    name: str
    step: int
    start: float
    end: float


@dataclass(frozen=True)
class Layout:
    """A stacked chart: every step is one unit wide, with its points side by side in their order.

    Attributes:
        x: Where each point lies; the setup is the stretch before 0, step k lies between k - 1 and k.
        times_s: When each point was, in seconds since recording began.
        phase: The position in `stretches` of each point.
        bands: Bytes at each point, by category, from the bottom up; without those too thin to be seen.
        left_out: The categories that are too thin, with their highest value, for a note.
        stretches: The phases.
        steps: Numbers of the steps, in order; not 0.
    """

    x: list[float]
    times_s: list[float]
    phase: list[int]
    bands: dict[str, list[int]]
    left_out: dict[str, int]
    stretches: list[Stretch]
    steps: list[int]

    @property
    def totals(self) -> list[int]:
        """The sum of all bands at each point."""
        return [sum(values) for values in zip(*self.bands.values(), strict=True)]

    @property
    def skipped(self) -> set[int]:
        """The steps that came to their end without the optimizer's: an overflow, say."""
        names: dict[int, set[str]] = {}
        for stretch in self.stretches:
            names.setdefault(stretch.step, set()).add(stretch.name)
        return {step for step in self.steps if {"clip", "between"} <= names[step] and "step" not in names[step]}

    def step_labels(self, most: int = 10) -> dict[float, str]:
        """Where to write what about steps on the axis; of more than ``most`` only some, by number."""
        every = -(-len(self.steps) // most)
        return {
            index + 0.5: f"step {step}" if every == 1 else str(step)
            for index, step in enumerate(self.steps)
            if index % every == 0
        }

    def note(self) -> str:
        """A sentence about what is not drawn; empty if everything is."""
        if not self.left_out:
            return ""
        listed = ", ".join(f"{name} ({readable(nbytes)})" for name, nbytes in self.left_out.items())
        return f"Too little to be seen: {listed}."


def layout_of(record: MemoryRecord, setup_width: float = 0.5) -> Layout:
    """Places a recording on the axes of a chart.

    Args:
        record: With at least one point.
        setup_width: How much room what comes before the first step gets, in steps.
    """
    positions: dict[int, list[int]] = {}
    for index, point in enumerate(record.points):
        positions.setdefault(point.step, []).append(index)
    steps = sorted(step for step in positions if step)
    x = [0.0] * len(record.points)
    stretches: list[Stretch] = []
    phase_of = [0] * len(record.points)
    for step, indices in sorted(positions.items()):
        left, width = (-setup_width, setup_width) if step == 0 else (float(steps.index(step)), 1.0)
        if step == 0 and not steps:
            width = 1.0
        for place, index in enumerate(indices):
            x[index] = left + width * place / max(len(indices) - 1, 1)
        for index in indices:
            point = record.points[index]
            name = record.phases[point.phase].name
            if not stretches or (stretches[-1].name, stretches[-1].step) != (name, step):
                stretches.append(Stretch(name, step, x[index], x[index]))
            stretches[-1] = Stretch(name, step, stretches[-1].start, x[index])
            phase_of[index] = len(stretches) - 1
    top = max((point.total for point in record.points), default=0)
    bands, left_out = {}, {}
    for name in record.categories:
        values = [point.bytes.get(name, 0) for point in record.points]
        if max(values, default=0) >= SMALLEST * top and any(values):
            bands[name] = values
        elif any(values):
            left_out[name] = max(values)
    return Layout(x, [point.time_s for point in record.points], phase_of, bands, left_out, stretches, steps)

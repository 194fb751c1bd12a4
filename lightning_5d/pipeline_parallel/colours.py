"""The colours of pipeline charts, on paper and in pages."""

from __future__ import annotations

from lightning_5d.pipeline_parallel.schedule import Action, Kind, Schedule

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


def shades_of(schedule: Schedule) -> int:
    """How many shades of each colour a schedule takes: stages of a rank, or directions."""
    return max(len(schedule.placement), schedule.stages // schedule.ranks)


def shade_of(schedule: Schedule, rank: int, action: Action) -> int:
    """The shade of an action, from 0: in a bidirectional pipeline its direction, else which stage of the rank it belongs to."""
    if len(schedule.placement) > 1:
        return schedule.copies[action.microbatch]
    return schedule.stages_of(rank).index(action.stage)


def colour_of(kind: Kind, shade: int, shades: int) -> str:
    """A colour such as ``#2f6fc4``; later shades are lighter."""
    light = 0.6 * shade / max(1, shades - 1)
    return "#" + "".join(f"{round(255 * (part + (1 - part) * light)):02x}" for part in _parts(COLOURS[kind]))


def ink_on(colour: str) -> str:
    """The colour of text that can be read on another colour."""
    red, green, blue = _parts(colour)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.58 else "black"


def _parts(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return red, green, blue

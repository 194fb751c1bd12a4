"""A step as a page: one file, inline SVG and script, nothing fetched. Planned above actual, values under the pointer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from lightning_5d.pipeline_parallel.colours import COLOURS, WORDS, colour_of, ink_on, shade_of, shades_of
from lightning_5d.pipeline_parallel.schedule import Action, Kind, actions_of
from lightning_5d.pipeline_parallel.summary import COLUMNS, number, summarize
from lightning_5d.pipeline_parallel.timeline import Timeline
from lightning_5d.pipeline_parallel.trace.recorder import RECEIVE, SEND
from lightning_5d.pipeline_parallel.trace.step import StepTrace
from lightning_5d.pipeline_parallel.trace.units import unit_for

_ROW, _BOX, _STRIP, _HEADING, _AXIS, _LIVE = 38, 26, 6, 26, 22, 90
"""Heights in pixels: of a rank, of its boxes, of the strip with its messages, of a heading, of the axis, of the live activations."""

Box = list[Any]
"""What the pointer shows: kind, stage, microbatch, start and end in seconds, live activations, peer, bytes."""


def step_page(trace: StepTrace) -> str:
    """The page of a step.

    Rows of the planned step lie above those of the actual one, on the same clock; the page zooms. Under the pointer: action, start,
    duration, live activations, and the same action on the other side.
    """
    ranks = trace.schedule.ranks
    until = max(trace.actual.makespan, trace.planned.makespan) or 1.0
    per_second, unit = unit_for(until)
    parts: list[str] = []
    labels: list[str] = []
    rows: list[dict[str, Any]] = []
    y = 0
    for heading, timeline in (("planned", trace.planned), ("as it ran", trace.actual)):
        labels.append(f'<div class="heading" style="height:{_HEADING}px">{heading}</div>')
        y += _HEADING
        for rank in range(ranks):
            labels.append(f'<div style="height:{_ROW}px;line-height:{_BOX}px">rank {rank}</div>')
            actual = timeline is trace.actual
            boxes = list(_computed(timeline, trace, rank, actual=actual))
            parts.append(f'<rect class="bubble" x="0" y="{y}" width="{_x(timeline.makespan, until)}" height="{_BOX}"/>')
            if actual:
                parts += _gaps(trace, rank, y, until)
            parts += _drawn(boxes, trace, rank, y, until, len(rows))
            rows.append({"rank": rank, "top": y, "height": _BOX, "side": heading, "boxes": boxes})
            if actual:
                messages = list(_messages(trace, rank))
                parts += _strips(messages, y + _BOX + 2, until)
                rows.append(
                    {"rank": rank, "top": y + _BOX, "height": _STRIP + 4, "side": "messages", "boxes": messages}
                )
            y += _ROW
    labels.append(f'<div style="height:{_LIVE}px" class="note">{_live_label(trace)}</div>')
    parts.append(_live(trace, y, until))
    height = y + _LIVE + _AXIS
    data = {
        "until": until, "perSecond": per_second, "unit": unit, "axis": y + _LIVE, "rows": rows,
        "words": {**{kind.value: words for kind, words in WORDS.items()}, SEND: "send", RECEIVE: "receive (waiting for it)"},
    }  # fmt: skip
    title = f"{trace.schedule.title}: step {trace.step}"
    body = (
        f"{_legend(trace)}{_summary(trace, per_second, unit)}"
        '<p class="zoom"><button data-zoom="0.5">−</button><button data-zoom="2">+</button>'
        '<button data-zoom="0">whole step</button> <span>or Ctrl and the wheel</span></p>'
        f'<div class="chart"><div class="labels">{"".join(labels)}</div><div class="scroll">'
        f'<svg height="{height}" role="img" aria-label="{escape(title)}">{"".join(parts)}<g id="axis"></g></svg>'
        f'</div><div class="tip"></div></div>{_ranks(trace, per_second, unit)}{_note(trace)}'
    )
    return _page(title, body, data)


def _computed(timeline: Timeline, trace: StepTrace, rank: int, *, actual: bool) -> Iterator[Box]:
    """The computations of a rank, with which half of the row they take: 0 all of it, 1 the upper, 2 the lower."""
    counted = {(e.kind, e.stage, e.microbatch): e for e in trace.ranks[rank] if e.computes}
    for span in timeline.timeline[rank]:
        actions = actions_of(span.entry)
        for index, action in enumerate(actions, start=1):
            event = counted.get((action.kind, action.stage, action.microbatch)) if actual else None
            live = None if event is None else event.live
            half = index if len(actions) > 1 else 0
            yield [action.kind.value, action.stage, action.microbatch, span.start, span.end, live, None, 0, half]


def _messages(trace: StepTrace, rank: int) -> Iterator[Box]:
    for event in trace.ranks[rank]:
        if not event.computes and event.end > 0:
            yield [
                event.kind,
                event.stage,
                event.microbatch,
                event.start,
                event.end,
                event.live,
                event.peer,
                event.nbytes,
                0,
            ]


def _drawn(boxes: Sequence[Box], trace: StepTrace, rank: int, y: int, until: float, row: int) -> Iterator[str]:
    shades = shades_of(trace.schedule)
    for index, (kind, stage, microbatch, start, end, *_, half) in enumerate(boxes):
        colour = colour_of(Kind(kind), shade_of(trace.schedule, rank, Action(Kind(kind), stage, microbatch)), shades)
        top, height = (y + _BOX / 2 * (half == 2), _BOX / 2) if half else (y, _BOX)
        yield (
            f'<rect class="box" id="b{row}-{index}" x="{_x(start, until)}" y="{top:g}" width="{_x(end - start, until)}" '
            f'height="{height:g}" fill="{colour}"/>'
            f'<text x="{_x((start + end) / 2, until)}" y="{top + height / 2 + 4:g}" fill="{ink_on(colour)}" '
            f'data-share="{(end - start) / until:.6f}">{microbatch}</text>'
        )


def _gaps(trace: StepTrace, rank: int, y: int, until: float) -> Iterator[str]:
    for gap in trace.idle(rank):
        if gap.doing:
            place = f'x="{_x(gap.start, until)}" y="{y}" width="{_x(gap.end - gap.start, until)}" height="{_BOX}"'
            yield f'<rect class="{gap.doing}" {place}/>'


def _strips(messages: Iterable[Box], y: int, until: float) -> Iterator[str]:
    for kind, _, _, start, end, *_ in messages:
        left = max(start, 0.0)
        place = f'x="{_x(left, until)}" y="{y}" width="{_x(end - left, until)}" height="{_STRIP}"'
        yield f'<rect class="message {kind}" {place}/>'


def _live(trace: StepTrace, y: int, until: float) -> str:
    """Lines of the activations that the rank with the most keeps, planned and counted."""
    worst, most = _worst(trace)
    lines = []
    for name, timeline in (("planned", trace.planned), ("actual", trace.actual)):
        points, before = ["0,100"], 0.0
        steps = timeline.live_activations(worst)
        for time, live in [*steps, (timeline.makespan, steps[-1][1] if steps else 0.0)]:
            x = 1000 * time / until
            points.append(f"{x:.3f},{100 - 100 * before / most:.2f}")
            before = live
            points.append(f"{x:.3f},{100 - 100 * before / most:.2f}")
        lines.append(f'<polyline class="live {name}" points="{" ".join(points)}"/>')
    return (
        f'<svg x="0" y="{y + 8}" width="100%" height="{_LIVE - 14}" viewBox="0 0 1000 100" preserveAspectRatio="none">'
        f"{''.join(lines)}</svg>"
    )


def _worst(trace: StepTrace) -> tuple[int, float]:
    peaks = trace.actual.peak_activations
    worst = peaks.index(max(peaks))
    return worst, max(peaks[worst], trace.planned.peak_activations[worst]) or 1.0


def _live_label(trace: StepTrace) -> str:
    worst, most = _worst(trace)
    return f"live activations of rank {worst}, up to {number(most)}; dashed: planned"


def _legend(trace: StepTrace) -> str:
    kinds = {event.kind for events in trace.ranks for event in events}
    items = [f'<li><i style="background:{COLOURS[kind]}"></i>{WORDS[kind]}</li>' for kind in COLOURS if kind in kinds]
    if shades_of(trace.schedule) > 1:
        what = "second direction" if len(trace.schedule.placement) > 1 else "later stage of the rank"
        items.append(f'<li><i style="background:{colour_of(Kind.FORWARD, 1, 2)}"></i>lighter: {what}</li>')
    items.append('<li><i class="bubble"></i>bubble</li>')
    items += [
        f'<li><i class="{kind}"></i>{words}</li>'
        for kind, words in ((RECEIVE, "waiting for a message"), (SEND, "sending"))
        if kind in kinds
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _summary(trace: StepTrace, per_second: float, unit: str) -> str:
    rows = [["", *COLUMNS[2:]]]
    for name, timeline in (("planned", trace.planned), ("as it ran", trace.actual)):
        times = [f"{number(time * per_second)} {unit}" for time in (timeline.period, max(timeline.bubble))]
        rows.append([name, *times, *summarize(timeline)[4:]])
    return _table(
        rows,
        "Planned is the schedule simulated with the mean time of each stage's actions, and messages that take no time",
    )


def _ranks(trace: StepTrace, per_second: float, unit: str) -> str:
    rows = [["rank", "computing", "waiting for messages", "sending", "other bubble", "peak", "planned peak"]]
    for rank in range(trace.schedule.ranks):
        idle = trace.idle_seconds(rank)
        seconds = (trace.actual.busy[rank], idle[RECEIVE], idle[SEND], idle["other"])
        peaks = (trace.actual.peak_activations[rank], trace.planned.peak_activations[rank])
        rows.append([str(rank), *(f"{number(time * per_second)} {unit}" for time in seconds), *map(number, peaks)])
    return _table(rows, "What each rank did until the last one was through")


def _note(trace: StepTrace) -> str:
    error = f" Clocks of the hosts agree to {trace.clock_error * 1e6:.0f} µs." if trace.clock_error else ""
    return f'<p class="note">Times are from the first computation of the step.{error}</p>'


def _table(rows: Sequence[Sequence[str]], caption: str) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows[1:])
    return f'<div class="table"><table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _x(seconds: float, until: float) -> str:
    return f"{100 * seconds / until:.4f}%"


def _page(title: str, body: str, data: object) -> str:
    folder = files("lightning_5d.pipeline_parallel.trace")
    style, script = folder.joinpath("page.css").read_text(), folder.joinpath("page.js").read_text()
    inline = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n<body><h1>{escape(title)}</h1>{body}\n"
        f"<script>\nconst data = {inline};\n{script}</script></body></html>\n"
    )

"""The charts as pages: one file each, inline SVG and script, nothing fetched. They follow the reader's light or dark setting."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from lightning_5d.memory.categories import colours
from lightning_5d.memory.layout import SMALLEST, Layout
from lightning_5d.memory.record import MemoryRecord
from lightning_5d.memory.summary import MemorySummary, readable, unit_for

_WIDTH, _HEIGHT = 1000, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 10, 24, 40
_PLOT_WIDTH, _PLOT_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM


def rank_page(record: MemoryRecord, layout: Layout, title: str) -> str:
    """The stacked chart of one rank with the values under the pointer, and a table of its phases.

    Args:
        record: The recording, for the table.
        layout: What the chart shows.
        title: Of the page.
    """
    low, high = min(layout.x, default=0.0), max(layout.x, default=1.0)
    top, ticks, unit = _axis(layout.totals)

    def place_x(x: float) -> float:
        return _LEFT + _PLOT_WIDTH * (x - low) / ((high - low) or 1)

    parts = [_grid(top, ticks, unit)]
    colour = colours(layout.bands)
    floor = [0] * len(layout.x)
    for name, values in layout.bands.items():
        roof = [a + b for a, b in zip(floor, values, strict=True)]
        outline = [f"{place_x(x):.2f},{_place_y(y, top):.2f}" for x, y in zip(layout.x, roof, strict=True)]
        back = [f"{place_x(x):.2f},{_place_y(y, top):.2f}" for x, y in zip(layout.x[::-1], floor[::-1], strict=True)]
        parts.append(f'<polygon fill="{colour[name]}" points="{" ".join(outline + back)}"/>')
        floor = roof
    for stretch in layout.stretches:
        left, right = place_x(stretch.start), place_x(stretch.end)
        parts.append(
            f'<rect class="phase in-{escape(stretch.name)}" x="{left:.2f}" y="4" width="{right - left:.2f}" height="14"/>'
        )
        if right - left > 45 and stretch.step:
            parts.append(f'<text class="phase" x="{(left + right) / 2:.1f}" y="14">{escape(stretch.name)}</text>')
    for index in range(len(layout.steps)):
        parts.append(
            f'<line class="edge" x1="{place_x(index):.2f}" x2="{place_x(index):.2f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
        )
    for x, step in layout.step_labels().items():
        label = step + (", skipped" if layout.steps[int(x)] in layout.skipped and len(layout.steps) < 8 else "")
        parts.append(f'<text class="tick" x="{place_x(x):.1f}" y="{_HEIGHT - _BOTTOM + 18}">{label}</text>')
    if low < 0:
        parts.append(f'<text class="tick" x="{place_x(low / 2):.1f}" y="{_HEIGHT - _BOTTOM + 18}">setup</text>')
    parts.append(
        f'<text class="label" x="{_LEFT + _PLOT_WIDTH / 2}" y="{_HEIGHT - 4}">optimizer step, its allocations in order</text>'
    )
    data = {
        "x": [round(place_x(x), 2) for x in layout.x],
        "where": [
            f"{layout.stretches[p].name}" + (f" of step {layout.stretches[p].step}" if layout.stretches[p].step else "")
            for p in layout.phase
        ],
        "time": [round(time_s, 6) for time_s in layout.times_s],
        "bands": layout.bands,
        "colours": colour,
    }
    failure = f'<p class="failure">The run failed: {escape(record.failure)}</p>' if record.failure else ""
    note = f"<p>{escape(layout.note())}</p>" if layout.left_out else ""
    body = f"{failure}{_legend(list(layout.bands), colour)}{_svg(parts, title)}{note}{_phases(record)}"
    return _page(title, body, data)


def summary_page(summary: MemorySummary, title: str) -> str:
    """The ranks side by side at their peaks, and a table of each category's highest value."""
    names = [name for name in summary.categories if summary.highest(name)[0]]
    colour = colours(names)
    top, ticks, unit = _axis([peak.total for peak in summary.ranks])
    parts = [_grid(top, ticks, unit)]
    slot = _PLOT_WIDTH / max(len(summary.ranks), 1)
    width = min(slot * 0.6, 160)
    for position, peak in enumerate(summary.ranks):
        left = _LEFT + slot * (position + 0.5) - width / 2
        base = 0
        for name in names:
            nbytes = peak.peak.get(name, 0)
            y = _place_y(base + nbytes, top)
            parts.append(
                f'<rect fill="{colour[name]}" x="{left:.2f}" y="{y:.2f}" width="{width:.2f}" height="{_place_y(base, top) - y:.2f}">'
                f"<title>rank {peak.rank}, {escape(name)}: {readable(nbytes)}</title></rect>"
            )
            base += nbytes
        if slot > 60:
            centre = left + width / 2
            parts.append(f'<text class="tick" x="{centre:.1f}" y="{_HEIGHT - _BOTTOM + 18}">rank {peak.rank}</text>')
            parts.append(
                f'<text class="tick" x="{centre:.1f}" y="{_place_y(base, top) - 5:.1f}">{readable(peak.total)}</text>'
            )
    rows = [["rank", "peak", "when", *names]]
    rows += [
        [
            str(peak.rank),
            readable(peak.total),
            f"{peak.phase} of step {peak.step}" if peak.step else peak.phase,
            *(readable(peak.highest.get(name, 0)) for name in names),
        ]
        for peak in summary.ranks
    ]
    table = _table(rows, "The highest value of each category, at whatever moment")
    visible = [n for n in names if max(peak.peak.get(n, 0) for peak in summary.ranks) > SMALLEST * top]
    return _page(title, f"{_legend(visible, colour)}{_svg(parts, title)}{table}", None)


def _axis(totals: Sequence[int]) -> tuple[float, list[float], str]:
    """The top of the axis in bytes, its ticks in bytes, and the unit's name."""
    scale, unit = unit_for(totals)
    highest = (max(totals, default=0) or 1) / scale
    rough = highest / 6
    power = 10.0 ** math.floor(math.log10(rough))
    spacing = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough)
    count = int(highest * 1.03 / spacing)
    return highest * 1.03 * scale, [index * spacing * scale for index in range(count + 1)], unit


def _place_y(nbytes: float, top: float) -> float:
    return _TOP + _PLOT_HEIGHT * (1 - nbytes / top)


def _grid(top: float, ticks: Sequence[float], unit: str) -> str:
    scale = 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)
    parts = []
    for tick in ticks:
        y = _place_y(tick, top)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.2f}" y2="{y:.2f}"/>')
        parts.append(f'<text class="value" x="{_LEFT - 8}" y="{y + 4:.2f}">{tick / scale:g}</text>')
    middle = _TOP + _PLOT_HEIGHT / 2
    parts.append(f'<text class="label" x="16" y="{middle}" transform="rotate(-90 16 {middle})">memory in {unit}</text>')
    return "".join(parts)


def _svg(parts: Sequence[str], title: str) -> str:
    return (
        f'<div class="chart"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}'
        f'<line class="cursor" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/></svg><div class="tip"></div></div>'
    )


def _legend(names: Sequence[str], colour: dict[str, str]) -> str:
    items = "".join(f'<li><i style="background:{colour[name]}"></i>{escape(name)}</li>' for name in names)
    return f'<ul class="legend">{items}</ul>'


def _phases(record: MemoryRecord) -> str:
    names = [name for name, nbytes in record.highest().items() if nbytes]
    rows = [["step", "phase", "highest total", *(f"{name}" for name in names)]]
    for phase in record.phases:
        values = [readable(phase.highest.get(name, 0)) for name in names]
        rows.append([str(phase.step or ""), phase.name, readable(sum(phase.peak.values())), *values])
    return _table(rows, "The highest value of each category in each phase")


def _table(rows: Sequence[Sequence[str]], caption: str) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows[1:])
    return f'<div class="table"><table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _page(title: str, body: str, data: object) -> str:
    folder = files("lightning_5d.memory")
    style, script = folder.joinpath("chart.css").read_text(), folder.joinpath("chart.js").read_text()
    inline = json.dumps(data).replace("</", "<\\/")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n<body><h1>{escape(title)}</h1>{body}\n"
        f"<script>\nconst data = {inline};\n{script}</script></body></html>\n"
    )

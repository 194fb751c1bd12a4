"""The files with pictures: one PNG and one HTML for each rank, and one of each for all."""

from __future__ import annotations

from pathlib import Path

from lightning_5d.memory import chart_html, chart_png
from lightning_5d.memory.layout import layout_of
from lightning_5d.memory.record import MemoryRecord, write
from lightning_5d.memory.summary import MemorySummary


def draw_rank(record: MemoryRecord, folder: Path, title: str) -> list[Path]:
    """Writes ``memory_rankN.png`` and ``.html`` and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    layout = layout_of(record)
    heading = f"{title}: memory of rank {record.rank} of {record.world_size} ({record.device})"
    if record.failure:
        heading += " until it failed"
    png, html = folder / f"memory_rank{record.rank}.png", folder / f"memory_rank{record.rank}.html"
    chart_png.stacked(layout, heading).savefig(png, dpi=150)
    write(html, chart_html.rank_page(record, layout, heading))
    return [png, html]


def draw_summary(summary: MemorySummary, folder: Path, title: str) -> list[Path]:
    """Writes ``memory_summary.png`` and ``.html`` and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    heading = f"{title}: peak memory by rank"
    png, html = folder / "memory_summary.png", folder / "memory_summary.html"
    chart_png.side_by_side(summary, heading).savefig(png, dpi=150)
    write(html, chart_html.summary_page(summary, heading))
    return [png, html]


def draw_folder(folder: Path, title: str) -> list[Path]:
    """Draws everything anew from the JSON files of a folder, also after a run that failed.

    Raises:
        ValueError: If there are none.
    """
    records = [MemoryRecord.load(path) for path in sorted(folder.glob("memory_rank*.json"))]
    if not records:
        raise ValueError(f"There is no memory_rank*.json in {folder}; MemoryProfiler writes them, in its own folder.")
    files = [path for record in records if record.phases for path in draw_rank(record, folder, title)]
    summary = MemorySummary.of(*records)
    return [*files, summary.save(folder), *draw_summary(summary, folder, title)]

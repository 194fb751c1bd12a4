"""The files of a trace, and what to say about it."""

from __future__ import annotations

import json
from pathlib import Path

from lightning_5d.pipeline_parallel.trace.chrome import chrome_trace
from lightning_5d.pipeline_parallel.trace.step import StepTrace


def stem_of(trace: StepTrace) -> str:
    """The name of its files, without their endings."""
    copy = f"_data{trace.data_rank}" if trace.data_rank else ""
    return f"step{trace.step:06d}{copy}"


def write_data(trace: StepTrace, folder: Path, *, chrome: bool = True) -> list[Path]:
    """Writes ``stepNNNNNN.json`` (all there is, for `StepTrace.load`) and ``stepNNNNNN.chrome.json``; returns their paths."""
    path = folder / f"{stem_of(trace)}.json"
    trace.save(path)
    if not chrome:
        return [path]
    viewer = folder / f"{stem_of(trace)}.chrome.json"
    viewer.write_text(json.dumps(chrome_trace(trace)))
    return [path, viewer]


def draw_trace(trace: StepTrace, folder: Path, *, png: bool = True, html: bool = True) -> list[Path]:
    """Draws ``stepNNNNNN.png`` and ``stepNNNNNN.html``, planned above actual; returns their paths."""
    from lightning_5d.pipeline_parallel.trace.chart import draw_step
    from lightning_5d.pipeline_parallel.trace.page import step_page

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    if png:
        files.append(folder / f"{stem_of(trace)}.png")
        draw_step(trace).savefig(files[-1], dpi=150)
    if html:
        files.append(folder / f"{stem_of(trace)}.html")
        files[-1].write_text(step_page(trace), encoding="utf-8")
    return files


def describe(trace: StepTrace) -> str:
    """Bubble and peak, measured and planned, in a line."""
    actual, planned = trace.actual, trace.planned
    return (
        f"{trace.schedule.name}, step {trace.step}: bubble {actual.bubble_ratio:.1%} measured, {planned.bubble_ratio:.1%} planned "
        f"(with a barrier after the step {actual.bubble_ratio_with_barrier:.1%} and {planned.bubble_ratio_with_barrier:.1%}); "
        f"peak {max(actual.peak_activations):g} microbatches measured, {max(planned.peak_activations):g} planned"
    )

"""`fived schedule`: draw pipeline schedules, and compare them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_5d.pipeline_parallel.schedule import Schedule
from lightning_5d.pipeline_parallel.schedules import SCHEDULES, known_name, make_schedule
from lightning_5d.pipeline_parallel.simulate import Durations, Simulation, Time, simulate
from lightning_5d.pipeline_parallel.summary import COLUMNS, summarize
from lightning_5d.pipeline_parallel.table import read_schedule, write_schedule
from lightning_5d.pipeline_parallel.text_chart import chart_text

_DPI = 150


def add_schedule_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `fived schedule` to its parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "schedules:\n" + "\n".join(f"  {name:<18}{family.summary}" for name, family in SCHEDULES.items())
    parser.add_argument(
        "names", nargs="+", metavar="NAME", help="a schedule (see below), or a table FILE.csv; several are compared"
    )
    parser.add_argument("--ranks", type=int, help="ranks of the pipeline; a table knows its own")
    parser.add_argument("--microbatches", type=int, help="microbatches of a step; a table knows its own")
    parser.add_argument("--chunks", type=int, help="stages per rank, where the schedule leaves it open (default: 2)")
    parser.add_argument(
        "--group-size", type=int, help="interleaved_1f1b: from RANKS, depth-first, to MICROBATCHES, breadth-first"
    )
    for name, what in (
        ("forward", "F"),
        ("backward", "B, the input's gradient"),
        ("weight", "W, the weights' gradient"),
    ):
        parser.add_argument(
            f"--{name}", type=_time, default=1.0, metavar="TIME",
            help=f"time of {what}, of a rank's share of one microbatch; or of every stage, T0,T1,… (default: 1)",
        )  # fmt: skip
    parser.add_argument(
        "--communication", type=float, default=0.0, metavar="TIME", help="time from rank to rank (default: 0)"
    )
    parser.add_argument(
        "--overlapped", type=float, metavar="TIME", help="time of a DualPipe pair, F&B (default: F + B + W)"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw into an SVG file")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw into a PNG file")
    parser.add_argument("--text", action="store_true", help="draw into the terminal (default unless there is a file)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the schedule as a table")


def run_schedule(arguments: argparse.Namespace) -> int:
    """Draws what was asked for and returns the exit status."""
    try:
        durations = Durations(
            arguments.forward, arguments.backward, arguments.weight, arguments.communication, arguments.overlapped
        )
        simulations = [simulate(schedule, durations) for schedule in _schedules(arguments)]
        _write_files(arguments, simulations)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    console = Console(highlight=False)
    if arguments.text or not (arguments.svg or arguments.png or arguments.csv):
        for simulation in simulations:
            console.print(simulation.schedule.title)
            # A file has room for lines of any length.
            chart = chart_text(simulation, console.width if console.is_terminal else None)
            console.print(chart, no_wrap=True, overflow="ignore", crop=False)
    table = Table(*COLUMNS, box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for simulation in simulations:
        table.add_row(*summarize(simulation))
    console.print(table)
    console.print(f"Times: {durations}. Peak: microbatches of 1/ranks of the model.")
    return 0


def _schedules(arguments: argparse.Namespace) -> list[Schedule]:
    tables = {name: read_schedule(name) for name in arguments.names if name.lower().endswith(".csv")}
    names = [name if name in tables else known_name(name) for name in arguments.names]
    if arguments.csv and len(names) > 1:
        raise ValueError(f"--csv writes one schedule, but there are {len(names)}; name one of them.")
    if len(tables) < len(names) and (arguments.ranks is None or arguments.microbatches is None):
        raise ValueError(f"{', '.join(name for name in names if name not in tables)}: give --ranks and --microbatches.")
    schedules = []
    for name in names:
        table = tables.get(name)
        ranks = table.ranks if table and arguments.ranks is None else arguments.ranks
        microbatches = table.microbatches if table and arguments.microbatches is None else arguments.microbatches
        options = {
            option: value
            for option, value in (("chunks", arguments.chunks), ("group_size", arguments.group_size))
            if value is not None and _takes(name, option, names)
        }
        schedules.append(make_schedule(name, ranks, microbatches, **options))
    return schedules


def _takes(name: str, option: str, names: list[str]) -> bool:
    """Whether a schedule is given an option: of several, those that have it; if none has it, all, to be refused."""
    with_it = [other for other in names if other in SCHEDULES and option in SCHEDULES[other].options]
    return name in with_it or not with_it


def _write_files(arguments: argparse.Namespace, simulations: list[Simulation]) -> None:
    if arguments.csv:
        write_schedule(simulations[0].schedule, arguments.csv)
        print(arguments.csv)
    pictures = [path for path in (arguments.svg, arguments.png) if path]
    if not pictures:
        return
    from lightning_5d.pipeline_parallel.chart import draw_schedules

    figure = draw_schedules(simulations)
    for path, kind in ((arguments.svg, "svg"), (arguments.png, "png")):
        if path:
            figure.savefig(path, format=kind, dpi=_DPI, metadata={"Date": None} if kind == "svg" else None)
            print(path)


def _time(text: str) -> Time:
    try:
        times = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give a number, or one per stage as 1,1,2") from None
    return times if len(times) > 1 else times[0]

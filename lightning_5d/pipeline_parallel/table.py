"""Schedules as tables of text, comma-separated, for a spreadsheet or a text editor.

One line per rank, one cell per action, in the order the rank runs them. A cell is stage, kind, microbatch: `0F2` is
the forward of stage 0 for microbatch 2, `0B2` the gradient of its input, `0W2` that of its weights, `0BW2` both at once. Two
cells joined by a plus sign, `0F4+3BW1`, overlap. Empty cells mean nothing, so columns may be used as a clock. Lines
that begin with `#` are comments, except these, all optional:

    # name: my schedule
    # placement: 0 1 2 3               the rank of each stage; for two copies of the parameters, 0 1 2 3 / 3 2 1 0
    # copies: 0 0 1 1                  the copy of each microbatch

Without them the name is the file's, and placement and copies are read off the forwards: microbatches whose stages lie
on the same ranks share a copy.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

from lightning_5d.pipeline_parallel.schedule import Action, Entry, Kind, Overlap, Row, Schedule, flatten

_CELL = re.compile(r"(\d+)\s*(F|BW|B|W)\s*(\d+)", re.IGNORECASE)
_HEADER = re.compile(r"#\s*(name|placement|copies)\s*:\s*(.*)", re.IGNORECASE)


def format_schedule(schedule: Schedule) -> str:
    """The table of a schedule; `parse_schedule` makes the same schedule of it."""
    lines = [
        f"# name: {schedule.name}",
        f"# placement: {' / '.join(' '.join(map(str, placed)) for placed in schedule.placement)}",
        f"# copies: {' '.join(map(str, schedule.copies))}",
        *(",".join(entry.cell for entry in row) for row in schedule.rows),
    ]
    return "\n".join(lines) + "\n"


def write_schedule(schedule: Schedule, path: str | Path) -> None:
    """Writes the table of a schedule into a file."""
    Path(path).write_text(format_schedule(schedule), encoding="utf-8")


def read_schedule(path: str | Path) -> Schedule:
    """Reads a table; the module's text describes it.

    Raises:
        ValueError: If there is no such file, or it is not such a table. Whether what it says can run is `validate`'s question.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"Cannot read the schedule {str(path)!r}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"The schedule {str(path)!r} is not UTF-8 text: {error.reason} at {error.start}.") from error
    return parse_schedule(text, Path(path).stem)


def parse_schedule(text: str, name: str = "table") -> Schedule:
    """Makes a schedule of a table.

    Args:
        text: The table; the module's text describes it.
        name: The schedule's name if the table does not have one.

    Raises:
        ValueError: If a cell or a header cannot be read, with its place, or stages and microbatches have no rank.
    """
    headers: dict[str, str] = {}
    rows: list[Row] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#"):
            if header := _HEADER.match(line.strip()):
                headers[header[1].lower()] = header[2].strip()
        elif line.strip():
            cells = next(csv.reader([line], skipinitialspace=True))
            rows.append(
                tuple(_entry(cell.strip(), number, column) for column, cell in enumerate(cells, 1) if cell.strip())
            )
    name = headers.get("name", name)
    if "placement" in headers:
        parts = headers["placement"].split("/")
        placement = tuple(_numbers(part, "placement") for part in parts)
        known = _numbers(headers["copies"], "copies") if "copies" in headers else ()
        count = 1 + max((action.microbatch for row in rows for action in flatten(row)), default=-1)
        copies = known or _copies_of(_routes(rows, name), placement, count)
    else:
        routes = _routes(rows, name)
        placement = tuple(dict.fromkeys(routes))
        copies = tuple(placement.index(route) for route in routes)
    return Schedule(name, placement, copies, tuple(rows))


def _entry(cell: str, line: int, column: int) -> Entry:
    actions = []
    for part in cell.split("+"):
        match = _CELL.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"Line {line}, cell {column} is {cell!r}; a cell is stage, kind (F, B, W or BW) and microbatch, such as 0F2, or two "
                "of them joined by a plus sign."
            )
        actions.append(Action(Kind(match[2].upper()), int(match[1]), int(match[3])))
    if len(actions) > 2:
        raise ValueError(f"Line {line}, cell {column} is {cell!r}: {len(actions)} actions; two can overlap.")
    return actions[0] if len(actions) == 1 else Overlap(*actions)


def _numbers(text: str, what: str) -> tuple[int, ...]:
    words = text.split()
    if not words or not all(word.isdecimal() for word in words):
        raise ValueError(f"The table's {what} are {text!r}; they are numbers from 0 on with blanks between them.")
    return tuple(map(int, words))


def _routes(rows: list[Row], name: str) -> list[tuple[int, ...]]:
    """For each microbatch, the rank that runs the forward of each stage."""
    where: dict[tuple[int, int], int] = {}
    for rank, row in enumerate(rows):
        for action in flatten(row):
            if action.kind is Kind.FORWARD:
                other = where.setdefault((action.microbatch, action.stage), rank)
                if other != rank:
                    raise ValueError(
                        f"Schedule {name!r}: {action} is on rank {other} and on rank {rank}; once is right."
                    )
    every = [action for row in rows for action in flatten(row)]
    stages = 1 + max((action.stage for action in every), default=-1)
    microbatches = 1 + max((action.microbatch for action in every), default=-1)
    if not every:
        raise ValueError(f"Schedule {name!r} has no action.")
    for microbatch in range(microbatches):
        for stage in range(stages):
            if (microbatch, stage) not in where:
                missing = Action(Kind.FORWARD, stage, microbatch)
                raise ValueError(
                    f"Schedule {name!r} has {stages} stages and {microbatches} microbatches, but {missing} is missing."
                )
    return [tuple(where[microbatch, stage] for stage in range(stages)) for microbatch in range(microbatches)]


def _copies_of(routes: list[tuple[int, ...]], placement: tuple[tuple[int, ...], ...], count: int) -> tuple[int, ...]:
    if len(placement) == 1:
        return (0,) * count
    return tuple(placement.index(route) if route in placement else 0 for route in routes)

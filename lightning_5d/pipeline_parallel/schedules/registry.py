"""The schedules by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from lightning_5d.pipeline_parallel.schedule import Schedule
from lightning_5d.pipeline_parallel.schedules.afab import afab
from lightning_5d.pipeline_parallel.schedules.dualpipe import dualpipe, dualpipe_v
from lightning_5d.pipeline_parallel.schedules.interleaved import interleaved_1f1b, looped_bfs
from lightning_5d.pipeline_parallel.schedules.one_forward_one_backward import one_forward_one_backward
from lightning_5d.pipeline_parallel.schedules.v_shaped import v_half, v_min, zb_v
from lightning_5d.pipeline_parallel.schedules.zero_bubble import zb_h1, zb_h2
from lightning_5d.pipeline_parallel.table import read_schedule
from lightning_5d.pipeline_parallel.validate import check


@dataclass(frozen=True)
class Family:
    """A generator of schedules.

    Attributes:
        generate: Called with ranks and microbatches, and with the options it has.
        chunks: Stages that a rank holds (of one copy of the parameters), or ``None`` where that is an option.
        copies: Copies of the parameters.
    """

    generate: Callable[..., Schedule]
    chunks: int | None = 1
    copies: int = 1

    @property
    def options(self) -> tuple[str, ...]:
        """The options of the generator."""
        return tuple(inspect.signature(self.generate).parameters)[2:]

    @property
    def summary(self) -> str:
        """What it does, in a line."""
        return (inspect.getdoc(self.generate) or "").partition("\n")[0]


SCHEDULES: dict[str, Family] = {
    "afab": Family(afab),
    "1f1b": Family(one_forward_one_backward),
    "interleaved_1f1b": Family(interleaved_1f1b, chunks=None),
    "looped_bfs": Family(looped_bfs, chunks=None),
    "zb_h1": Family(zb_h1),
    "zb_h2": Family(zb_h2),
    "zb_v": Family(zb_v, chunks=2),
    "v_half": Family(v_half, chunks=2),
    "v_min": Family(v_min, chunks=2),
    "dualpipe": Family(dualpipe, copies=2),
    "dualpipe_v": Family(dualpipe_v, chunks=2),
}
"""All generators, by the name a person writes."""


def make_schedule(
    name: str, ranks: int, microbatches: int, *, chunks: int | None = None, group_size: int | None = None
) -> Schedule:
    """Makes a schedule.

    Args:
        name: One of `SCHEDULES` (capitals and hyphens do not matter), or the path of a table, ``something.csv``.
        ranks: Ranks of the pipeline.
        microbatches: Microbatches of a step.
        chunks: Stages per rank, for a schedule that leaves it open.
        group_size: Microbatches that go through a rank's stages together, for ``interleaved_1f1b``.

    Raises:
        ValueError: If there is no such schedule, a size is below 1, an option is not one of this schedule's or does not fit,
            or a table cannot be read, cannot run, or is for other sizes.
    """
    for what, size in (("ranks", ranks), ("microbatches", microbatches)):
        if size < 1:
            raise ValueError(f"{what} is {size}; a pipeline has 1 or more.")
    if name.lower().endswith(".csv"):
        return _from_table(name, ranks, microbatches, chunks, group_size)
    key = known_name(name)
    family = SCHEDULES[key]
    options: dict[str, int] = {}
    if chunks is not None and family.chunks is None:
        options["chunks"] = chunks
    elif chunks is not None and chunks != family.chunks:
        takers = _that_take("chunks")
        raise ValueError(
            f"{key} has {family.chunks} stage{'s' if family.chunks != 1 else ''} per rank, not chunks={chunks}; "
            f"leave chunks out, or use {takers}."
        )
    if group_size is not None:
        if "group_size" not in family.options:
            raise ValueError(
                f"{key} has no group_size (here {group_size}); leave it out, or use {_that_take('group_size')}."
            )
        options["group_size"] = group_size
    schedule: Schedule = family.generate(ranks, microbatches, **options)
    return schedule


def known_name(name: str) -> str:
    """The name of a schedule as `SCHEDULES` spells it.

    Raises:
        ValueError: If there is none; it names the nearest, and all.
    """
    key = name.strip().lower().replace("-", "_")
    key = {"gpipe": "afab", "interleaved": "interleaved_1f1b", "dualpipev": "dualpipe_v"}.get(key, key)
    if key in SCHEDULES:
        return key
    near = get_close_matches(key, SCHEDULES, n=1, cutoff=0.4)
    nearest = f"the nearest is {near[0]}; " if near else ""
    raise ValueError(
        f"There is no schedule {name!r}; {nearest}there are {', '.join(SCHEDULES)}, and tables (a path that ends in .csv)."
    )


def _from_table(path: str, ranks: int, microbatches: int, chunks: int | None, group_size: int | None) -> Schedule:
    schedule = check(read_schedule(Path(path)))
    if group_size is not None:
        raise ValueError(f"{path} is a table, which has no group_size (here {group_size}); leave it out.")
    sizes = {"ranks": (ranks, schedule.ranks), "microbatches": (microbatches, schedule.microbatches)}
    if chunks is not None:
        sizes["chunks"] = (chunks, schedule.stages // schedule.ranks)
    for what, (asked, has) in sizes.items():
        if asked != has:
            raise ValueError(f"{path} is a table for {what}={has}, not {asked}; use {has}, or another table.")
    return schedule


def _that_take(option: str) -> str:
    return " or ".join(name for name, family in SCHEDULES.items() if option in family.options)

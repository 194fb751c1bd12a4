"""What was recorded on one rank, and its way to files and back."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_5d.memory.categories import CATEGORIES, in_order

Bytes = dict[str, int]


@dataclass(frozen=True)
class Point:
    """The bytes of every category at one moment.

    Attributes:
        step: Number of the optimizer step it belongs to, from 1; 0 is everything before the first.
        batch: Number of the training batch, from 1; 0 before the first.
        phase: Number of the phase in `MemoryRecord.phases`.
        time_s: Seconds since recording began.
        bytes: By category.
    """

    step: int
    batch: int
    phase: int
    time_s: float
    bytes: Bytes

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class Phase:
    """One stretch of a step.

    Attributes:
        name: ``"setup"``, ``"gather"``, ``"forward"``, ``"backward"``, ``"clip"``, ``"step"``, ``"evaluation"`` or ``"between"``.
        step, batch: As in `Point`.
        start_s, end_s: Seconds since recording began.
        start, end: Bytes by category when it began and ended.
        peak: Bytes by category at the moment of its highest total.
        highest: The highest that each category was, at whatever moment.
        allocator: What the device's allocator says, in bytes: ``allocated`` and ``reserved`` at the end, and
            ``peak_allocated`` within; None on CPU, which has no such allocator.
    """

    name: str
    step: int
    batch: int
    start_s: float
    end_s: float
    start: Bytes
    end: Bytes
    peak: Bytes
    highest: Bytes
    allocator: dict[str, int] | None = None


@dataclass
class MemoryRecord:
    """All phases and points of one rank.

    Attributes:
        rank: Its number.
        world_size: How many there are.
        device: ``"cpu"``, ``"cuda"``, …: the kind of memory counted.
        failure: What ended the run early, if something did.
    """

    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    failure: str | None = None
    phases: list[Phase] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)

    @property
    def categories(self) -> list[str]:
        """Every category that has a number in here, in the order of the charts."""
        return in_order([name for phase in self.phases for name in phase.highest])

    def peak(self) -> Bytes:
        """Bytes by category at the moment of the highest total."""
        return max((phase.peak for phase in self.phases), key=lambda b: sum(b.values()), default={})

    def highest(self) -> Bytes:
        """The highest that each category was, at whatever moment."""
        return {name: max((phase.highest.get(name, 0) for phase in self.phases), default=0) for name in self.categories}

    def at_end(self, phase: str, step: int) -> Bytes:
        """Bytes by category when the last phase of that name in that step ended.

        Raises:
            ValueError: If there is none; says which there are.
        """
        found = [p for p in self.phases if p.name == phase and p.step == step]
        if not found:
            there = sorted({f"{p.name} of step {p.step}" for p in self.phases})
            raise ValueError(f"No {phase} of step {step} was recorded. There is: {', '.join(there) or 'nothing'}.")
        return dict.fromkeys(CATEGORIES, 0) | found[-1].end

    def save(self, folder: Path) -> list[Path]:
        """Writes ``memory_rankN.json`` (everything) and ``memory_rankN.csv`` (the points) and returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / f"memory_rank{self.rank}"
        json_path, csv_path = stem.with_suffix(".json"), stem.with_suffix(".csv")
        write(json_path, json.dumps({"format": 1, **asdict(self)}, indent=1))
        rows = [["step", "batch", "phase", "time_s", "total", *self.categories]]
        for point in self.points:
            values = [str(point.bytes.get(name, 0)) for name in self.categories]
            phase = self.phases[point.phase].name
            rows.append([str(point.step), str(point.batch), phase, f"{point.time_s:.6f}", str(point.total), *values])
        write(csv_path, rows)
        return [json_path, csv_path]

    @classmethod
    def load(cls, path: Path) -> MemoryRecord:
        """Reads what `save` wrote as JSON."""
        data: dict[str, Any] = json.loads(path.read_text())
        data.pop("format", None)
        data["phases"] = [Phase(**phase) for phase in data["phases"]]
        data["points"] = [Point(**point) for point in data["points"]]
        return cls(**data)


def write(path: Path, content: str | bytes | Sequence[Sequence[str]]) -> None:
    """Writes a file in one go: a reader, or a run that dies meanwhile, never leaves half of it. Rows become CSV."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    if isinstance(content, bytes):
        unfinished.write_bytes(content)
    elif isinstance(content, str):
        unfinished.write_text(content)
    else:
        with unfinished.open("w", newline="") as file:
            csv.writer(file).writerows(content)
    unfinished.replace(path)

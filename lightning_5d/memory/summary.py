"""All ranks side by side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_5d.memory.categories import in_order
from lightning_5d.memory.record import Bytes, MemoryRecord, write

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class RankPeak:
    """What one rank held at most.

    Attributes:
        rank: Its number.
        peak: Bytes by category at the moment of the highest total.
        highest: The highest that each category was, at whatever moment; these do not add up to a moment.
        step, phase: When the highest total was.
    """

    rank: int
    peak: Bytes
    highest: Bytes
    step: int
    phase: str

    @property
    def total(self) -> int:
        """The highest total."""
        return sum(self.peak.values())


@dataclass(frozen=True)
class MemorySummary:
    """The peaks of some ranks, in rank order."""

    ranks: tuple[RankPeak, ...]

    @classmethod
    def of(cls, *records: MemoryRecord) -> MemorySummary:
        """From recordings."""
        peaks = []
        for record in records:
            top = max(record.phases, key=lambda phase: sum(phase.peak.values()), default=None)
            step, phase = (top.step, top.name) if top is not None else (0, "")
            peaks.append(RankPeak(record.rank, record.peak(), record.highest(), step, phase))
        return cls(tuple(sorted(peaks, key=lambda peak: peak.rank)))

    @classmethod
    def together(cls, parts: Iterable[MemorySummary]) -> MemorySummary:
        """One from several, each of some ranks."""
        return cls(tuple(sorted((peak for part in parts for peak in part.ranks), key=lambda peak: peak.rank)))

    @property
    def categories(self) -> list[str]:
        """Every category of any rank, in the order of the charts."""
        return in_order([name for peak in self.ranks for name in peak.highest])

    def highest(self, category: str) -> tuple[int, int]:
        """The most bytes of a category on any rank, and which rank that is."""
        worst = max(self.ranks, key=lambda peak: peak.highest.get(category, 0))
        return worst.highest.get(category, 0), worst.rank

    def metrics(self) -> dict[str, float]:
        """For loggers: the peak of every category and of the total, over ranks, in MiB."""
        values = {f"memory_peak_MiB/{name}": self.highest(name)[0] / 2**20 for name in self.categories}
        return values | {"memory_peak_MiB/total": max(peak.total for peak in self.ranks) / 2**20}

    def text(self) -> str:
        """A few lines for a terminal."""
        top = max(self.ranks, key=lambda peak: peak.total)
        lines = [
            f"Memory: at most {readable(top.total)} on rank {top.rank}, in {top.phase} of step {top.step}. Peak of each category:"
        ]
        for name in self.categories:
            nbytes, rank = self.highest(name)
            if nbytes:
                lines.append(f"  {name:<24}{readable(nbytes):>12}   rank {rank}")
        return "\n".join(lines)

    def save(self, folder: Path) -> Path:
        """Writes ``memory_summary.json``."""
        folder.mkdir(parents=True, exist_ok=True)
        highest = {name: dict(zip(("bytes", "rank"), self.highest(name), strict=True)) for name in self.categories}
        path = folder / "memory_summary.json"
        write(path, json.dumps({"format": 1, **asdict(self), "highest": highest}, indent=1))
        return path


def readable(nbytes: float, digits: int = 1) -> str:
    """Bytes with a unit a person reads: ``1536`` is ``1.5 KiB``."""
    power = 0
    while abs(nbytes) >= 1024 and power < len(_UNITS) - 1:
        nbytes, power = nbytes / 1024, power + 1
    return f"{nbytes:.{digits if power else 0}f} {_UNITS[power]}"


def unit_for(values: Sequence[int]) -> tuple[int, str]:
    """The unit for an axis that shows these values: its size in bytes, and its name."""
    power = 0
    while max(values, default=0) >= 2 * 1024 ** (power + 1) and power < len(_UNITS) - 1:
        power += 1
    return 1024**power, _UNITS[power]

"""From changes of single storages to bytes by category over time. Pure: values in, values out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from lightning_5d.memory.categories import ACTIVATIONS, COMMUNICATION, ELSEWHERE, OTHER
from lightning_5d.memory.record import Bytes, Phase, Point
from lightning_5d.memory.storages import BEFORE, Change, Piece


@dataclass
class Segment:
    """One phase while it is being recorded.

    Attributes:
        number: Its number in the record.
        name: See `Phase.name`.
        step, batch: See `Point`.
        start_s, end_s: By `time.perf_counter`.
        allocator: See `Phase.allocator`.
    """

    number: int
    name: str
    step: int
    batch: int
    start_s: float
    end_s: float = 0.0
    allocator: dict[str, int] | None = None


def category_of(piece: Piece, names: Mapping[int, str]) -> str:
    """What a piece of memory is for: who has claimed it, else what the phase says in which it appeared.

    Args:
        piece: The piece; it may be gone.
        names: The names of phases by number.
    """
    if piece.category is not None:
        return piece.category
    name = names.get(piece.phase, "between")
    passing = piece.died == piece.phase
    if name == "evaluation":
        return ACTIVATIONS
    # A tensor that outlives the forward in which a collective touched it is an activation that was sent or received.
    if name == "gather" or (piece.collective and name != "setup" and (passing or name != "forward")):
        return COMMUNICATION
    if name == "forward" and (piece.graph or not passing):
        return ACTIVATIONS
    if name == "backward" and piece.graph:  # recomputed
        return ACTIVATIONS
    return OTHER


class Timeline:
    """Replays changes, part after part, and keeps the running sums.

    Args:
        zero_s: The time that counts as 0.
        resolution: Into how many equal parts (by number of changes) a phase is cut for its points; of each part the
            highest moment is kept, beside the phase's first and last one. So no spike is lost.
    """

    def __init__(self, zero_s: float, resolution: int = 48) -> None:
        self._zero_s, self._resolution = zero_s, resolution
        self._now: Bytes = {}
        self._names: dict[int, str] = {}
        self._pools: dict[int, int] = {}
        self._counted: dict[Piece, str] = {}

    def start(self, pools: Mapping[int, int]) -> None:
        """Takes in the memory that exchanges have kept since before the first phase; see `add`."""
        for address, nbytes in pools.items():
            self._open(address, nbytes)

    def add(
        self,
        segments: Sequence[Segment],
        changes: Sequence[Change],
        pools: Mapping[int, int],
        elsewhere: Mapping[int, int] = MappingProxyType({}),
    ) -> tuple[list[Phase], list[Point]]:
        """Replays one more part.

        Args:
            segments: The phases of this part, in order.
            changes: All changes in them, in order.
            pools: Memory that an exchange keeps for reuse, bytes by address. All of it counts as communication buffers;
                while a piece of it is lent to something else (a reduced gradient lies in it), as that.
            elsewhere: Memory of other ranks that this one reads in place, bytes by address; it counts there.

        Returns:
            The finished phases, and their points.
        """
        self._names |= {segment.number: segment.name for segment in segments}
        for piece, before in list(self._counted.items()):
            after = self._category(piece)
            if after != before:  # claimed since
                self._move(piece, before, -piece.counted)
                self._move(piece, after, piece.counted)
        by_phase: dict[int, list[Change]] = {}
        for change in changes:
            piece = change.piece
            if change.born and piece.category is None and elsewhere.get(piece.address) == change.delta:
                piece.category = ELSEWHERE
            if change.phase == BEFORE:
                self._apply(change, pools)
                continue
            by_phase.setdefault(max(change.phase, segments[0].number), []).append(change)
        phases, points = [], []
        for segment in segments:
            replay = _Replay(segment, self._now, self._zero_s, len(by_phase.get(segment.number, ())), self._resolution)
            for change in by_phase.get(segment.number, ()):
                replay.after(self._apply(change, pools), change.time_s)
            if segment is segments[-1]:
                for address, nbytes in pools.items():
                    if address not in self._pools:
                        self._open(address, nbytes)
                replay.after((COMMUNICATION,), segment.end_s)
            phase, its_points = replay.finished()
            phases.append(phase)
            points += its_points
        for address in [address for address in self._pools if address not in pools]:
            self._add(COMMUNICATION, -self._pools.pop(address))
        return phases, points

    def _apply(self, change: Change, pools: Mapping[int, int]) -> tuple[str, ...]:
        piece = change.piece
        if change.born and pools.get(piece.address) == change.delta:
            piece.lent = True
            if piece.address not in self._pools:
                self._open(piece.address, change.delta)
        category = self._counted.get(piece)
        if category is None:
            category = self._counted[piece] = self._category(piece)
        piece.counted += change.delta
        self._move(piece, category, change.delta)
        if not piece.counted and piece.died is not None:
            del self._counted[piece]
        return (category, COMMUNICATION)

    def _category(self, piece: Piece) -> str:
        if piece.lent and piece.category is None:
            return COMMUNICATION
        return category_of(piece, self._names)

    def _open(self, address: int, nbytes: int) -> None:
        self._pools[address] = nbytes
        self._add(COMMUNICATION, nbytes)

    def _move(self, piece: Piece, category: str, delta: int) -> None:
        self._add(category, delta)
        if piece.lent:
            self._add(COMMUNICATION, -delta)

    def _add(self, category: str, delta: int) -> None:
        if category != ELSEWHERE:
            self._now[category] = self._now.get(category, 0) + delta


class _Replay:
    """The points and highs of one phase while its changes are applied to ``now``."""

    def __init__(self, segment: Segment, now: Bytes, zero_s: float, changes: int, resolution: int) -> None:
        self._segment, self._now, self._zero_s = segment, now, zero_s
        self._bin = max(-(-changes // resolution), 1)
        self._seen = 0
        self._start = dict(now)
        self._highest = dict(now)
        self._top = dict(now)
        self._top_total = sum(now.values())
        self._best: tuple[int, float, Bytes] | None = None
        self._points = [self._point(segment.start_s, dict(now))]

    def after(self, categories: tuple[str, ...], time_s: float) -> None:
        """Takes note of ``now`` after a change to these categories."""
        for name in categories:
            self._highest[name] = max(self._highest.get(name, 0), self._now.get(name, 0))
        total = sum(self._now.values())
        if self._best is None or total > self._best[0]:
            self._best = (total, time_s, dict(self._now))
        if total > self._top_total:
            self._top_total, self._top = total, dict(self._now)
        self._seen += 1
        if self._seen % self._bin == 0:
            self._keep_best()

    def finished(self) -> tuple[Phase, list[Point]]:
        """The phase and its points."""
        self._keep_best()
        segment, end = self._segment, dict(self._now)
        self._points.append(self._point(segment.end_s, end))
        phase = Phase(
            name=segment.name,
            step=segment.step,
            batch=segment.batch,
            start_s=segment.start_s - self._zero_s,
            end_s=segment.end_s - self._zero_s,
            start=self._start,
            end=end,
            peak=self._top,
            highest=self._highest,
            allocator=segment.allocator,
        )
        return phase, self._points

    def _keep_best(self) -> None:
        if self._best is not None:
            self._points.append(self._point(self._best[1], self._best[2]))
            self._best = None

    def _point(self, time_s: float, state: Bytes) -> Point:
        segment = self._segment
        return Point(segment.step, segment.batch, segment.number, time_s - self._zero_s, state)

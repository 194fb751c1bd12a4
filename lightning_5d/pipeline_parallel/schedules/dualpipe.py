"""DualPipe and DualPipe-V (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.2.1, and the DualPipe repository)."""

from __future__ import annotations

from lightning_5d.pipeline_parallel.schedule import (
    Action,
    Entry,
    Kind,
    Overlap,
    Row,
    Schedule,
    keep_microbatches,
    looped_placement,
    v_placement,
)


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """Two pipelines in opposite directions over the same ranks, whose forwards and backwards overlap.

    Rank r holds stage r for the microbatches that enter at rank 0, and stage p - 1 - r for those that enter at rank p - 1:
    two copies of the parameters (`Schedule.placement`), whose gradients must be summed. The first half of the
    microbatches takes the first copy.

    Bubble (p/2 - 1)(F&B + B - 3W), in which, as in the source, B is the whole backward (in this package's letters: B + W), for even
    m ≥ 2p; rank 0 keeps p + 1 microbatches, and no rank more.

    Args:
        ranks: p, even; each holds two stages of p.
        microbatches: m, any number; an odd one gives the first copy one more than the second.

    Raises:
        ValueError: If the number of ranks is odd.
    """
    if ranks % 2:
        nearest = f"{ranks - 1} or {ranks + 1}" if ranks > 1 else "2"
        raise ValueError(
            f"dualpipe pairs rank r with rank p - 1 - r, but there are {ranks} ranks; use {nearest}, or dualpipe_v."
        )
    half = max(ranks, -(-microbatches // 2))
    first = -(-microbatches // 2)
    kept = {number: number for number in range(first)}
    kept |= {half + number: first + number for number in range(microbatches - first)}
    rows = []
    for rank in range(ranks):
        distance = min(rank, ranks - 1 - rank)  # to the end of the pipeline that is nearer
        stages, entering = (rank, ranks - 1 - rank), (0, half)
        if rank >= ranks // 2:
            stages, entering = stages[::-1], entering[::-1]
        full = _Rank(stages, entering).run(ranks // 2, distance, half)
        rows.append(keep_microbatches(full, kept))
    placement = (looped_placement(ranks), tuple(reversed(range(ranks))))
    return Schedule("dualpipe", placement, (0,) * first + (1,) * (microbatches - first), tuple(rows))


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipe folded in half: one copy of the parameters, in a V of two stages per rank.

    Where DualPipe has p ranks with p stages in each direction, this has p/2 ranks with p stages. Counted in
    stages as in the source, bubble and memory are DualPipe's. With p the number of ranks, and F, B, W the time of a rank's
    share (two stages): bubble (p - 1)(F&B + B - 3W)/2, B being the whole backward, for m ≥ 2p; a rank
    keeps at most 2p + 1 activations of half its share, so p + 1/2 microbatches.

    Args:
        ranks: p; rank r holds stages r and 2p - 1 - r.
        microbatches: m, any number.
    """
    full = max(microbatches, 2 * ranks)
    kept = {number: number for number in range(microbatches)}
    rows = tuple(
        keep_microbatches(_Rank((rank, 2 * ranks - 1 - rank), (0, 0)).run(ranks, rank, full), kept)
        for rank in range(ranks)
    )
    return Schedule("dualpipe_v", (v_placement(ranks),), (0,) * microbatches, rows)


class _Rank:
    """Writes the row of one rank, whose two stages belong to two directions: 0 enters nearer to this rank, 1 farther.

    Args:
        stages: The stage of each direction.
        first: The first microbatch of each direction.
    """

    def __init__(self, stages: tuple[int, int], first: tuple[int, int]) -> None:
        self._stages = stages
        self._first = first
        self._forwards = [0, 0]
        self._backwards = [0, 0]
        self._put_off: list[Action] = []
        self._row: list[Entry] = []

    def run(self, half_ranks: int, distance: int, count: int) -> Row:
        """The eight phases of DualPipe.

        Args:
            half_ranks: How many ranks lie between the ends of the pipelines and the middle.
            distance: This rank's from the nearer end.
            count: Microbatches of each direction, at least twice `half_ranks`.
        """
        to_middle = half_ranks - 1 - distance
        for _ in range(2 * to_middle):
            self._row.append(self._forward(0))
        for _ in range(distance + 1):
            self._row += [self._forward(0), self._forward(1)]
        for _ in range(to_middle):
            self._split_backward(1)
            self._weight()
            self._row.append(self._forward(1))
        for number in range(count - 2 * half_ranks + distance + 1):
            if number == 0 and to_middle == 0:
                # In the middle this backward is the other end of this forward's own way: nothing to weave.
                self._row += [self._forward(0), self._backward(1)]
            else:
                self._row.append(Overlap(self._forward(0), self._backward(1)))
            self._row.append(Overlap(self._forward(1), self._backward(0)))
        for _ in range(to_middle):
            self._row += [self._backward(1), Overlap(self._forward(1), self._backward(0))]
        # From half of these on, the weight gradients are kept for the waits that come.
        for number in range(2 * (distance + 1)):
            direction = 1 - number % 2
            if number > distance:
                self._split_backward(direction)
            else:
                self._row.append(self._backward(direction))
        for _ in range(to_middle):
            self._weight()
            self._split_backward(0)
        while self._put_off:
            self._weight()
        return tuple(self._row)

    def _forward(self, direction: int) -> Action:
        return self._next(Kind.FORWARD, direction, self._forwards)

    def _backward(self, direction: int) -> Action:
        return self._next(Kind.BACKWARD, direction, self._backwards)

    def _split_backward(self, direction: int) -> None:
        action = self._next(Kind.INPUT_GRADIENT, direction, self._backwards)
        self._row.append(action)
        self._put_off.append(Action(Kind.WEIGHT_GRADIENT, action.stage, action.microbatch))

    def _weight(self) -> None:
        self._row.append(self._put_off.pop(0))

    def _next(self, kind: Kind, direction: int, counts: list[int]) -> Action:
        microbatch = self._first[direction] + counts[direction]
        counts[direction] += 1
        return Action(kind, self._stages[direction], microbatch)

"""One forward, one backward: PipeDream-Flush (Narayanan et al. 2021, section 2.2)."""

from __future__ import annotations

from lightning_5d.pipeline_parallel.schedule import Action, Kind, Row, Schedule, looped_placement


def one_forward_one_backward(ranks: int, microbatches: int) -> Schedule:
    """After p - 1 - r forwards, rank r alternates forward and backward, so that no rank keeps more than p microbatches.

    ```
    rank 0: F0 F1 F2          B0 F3 B1 …
    rank 1:    F0 F1       B0 F2 B1 F3 …
    rank 2:       F0    B0 F1 B1 F2 B2 …
    ```

    Bubble (p - 1)(F + B + W) for any m; rank r keeps min(m, p - r) microbatches.

    Args:
        ranks: p; each holds one stage.
        microbatches: m, any number.
    """
    rows = tuple(_row(rank, min(ranks - 1 - rank, microbatches), microbatches) for rank in range(ranks))
    return Schedule("1f1b", (looped_placement(ranks),), (0,) * microbatches, rows)


def _row(rank: int, warmup: int, microbatches: int) -> Row:
    forwards = [Action(Kind.FORWARD, rank, microbatch) for microbatch in range(microbatches)]
    backwards = [Action(Kind.BACKWARD, rank, microbatch) for microbatch in range(microbatches)]
    return alternate(forwards, backwards, warmup)


def alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> Row:
    """The first `warmup` forwards, then forward and backward in turn, then the backwards that are left."""
    row = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        row += [forward, backward]
    return (*row, *backwards[len(forwards) - warmup :])

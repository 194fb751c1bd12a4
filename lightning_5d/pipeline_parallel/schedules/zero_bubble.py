"""Zero Bubble with one stage per rank: ZB-H1 and ZB-H2 (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2)."""

from __future__ import annotations

from lightning_5d.pipeline_parallel.schedule import Action, Kind, Row, Schedule, looped_placement


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with the weight gradient apart: rank r puts off r of them, which fill its wait at the end.

    ```
    rank 0: F0 F1 F2       B0 W0 F3    B1 W1 F4 …
    rank 1:    F0 F1    B0 F2 B1 W0 F3 B2 W1 F4 …
    rank 2:       F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 …
    ```

    Bubble (p - 1)(F + B - W), a third of 1F1B's when all are equal, for m ≥ p and W ≤ B; every rank keeps at most p microbatches.

    Args:
        ranks: p; each holds one stage.
        microbatches: m, any number.
    """
    rows = tuple(_row(rank, microbatches, ranks - rank, rank) for rank in range(ranks))
    return Schedule("zb_h1", (looped_placement(ranks),), (0,) * microbatches, rows)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """As ZB-H1 with further forwards before the first backward: nobody waits, for twice the activations of 1F1B.

    ```
    rank 0: F0 F1 F2 F3 F4 B0 W0 F5 B1 W1 F6 …
    rank 1:    F0 F1 F2 B0 F3 B1 F4 B2 W0 F5 …
    rank 2:       F0 B0 F1 B1 F2 B2 F3 B3 F4 …
    ```

    Bubble (p - 1)(F + B - 2W), 0 when all are equal, for m ≥ 2p - 1; every rank keeps at most 2p - 1 microbatches. The ranks
    end one after the other, so a barrier after each step brings the bubble of (p - 1)F back: it wants an optimizer
    that needs no global reduction before its step.

    Args:
        ranks: p; each holds one stage.
        microbatches: m, any number.
    """
    rows = tuple(_row(rank, microbatches, 2 * (ranks - rank) - 1, 2 * rank) for rank in range(ranks))
    return Schedule("zb_h2", (looped_placement(ranks),), (0,) * microbatches, rows)


def _row(stage: int, microbatches: int, ahead: int, put_off: int) -> Row:
    """`ahead` forwards, then backward, weight gradient of `put_off` microbatches ago, forward, until nothing is left."""
    row = [Action(Kind.FORWARD, stage, microbatch) for microbatch in range(min(ahead, microbatches))]
    for microbatch in range(microbatches + put_off):
        if microbatch < microbatches:
            row.append(Action(Kind.INPUT_GRADIENT, stage, microbatch))
        if microbatch >= put_off:
            row.append(Action(Kind.WEIGHT_GRADIENT, stage, microbatch - put_off))
        if microbatch + ahead < microbatches:
            row.append(Action(Kind.FORWARD, stage, microbatch + ahead))
    return tuple(row)

"""All forward, all backward: GPipe (Huang et al. 2019)."""

from __future__ import annotations

from lightning_5d.pipeline_parallel.schedule import Action, Kind, Schedule, looped_placement


def afab(ranks: int, microbatches: int) -> Schedule:
    """Every rank runs the forwards of all microbatches, then the backwards of all.

    ```
    rank 0: F0 F1 F2          B0 B1 B2
    rank 1:    F0 F1 F2    B0 B1 B2
    rank 2:       F0 F1 F2 B0 B1 B2
    ```

    Bubble (p - 1)(F + B + W), and all m microbatches are kept, for any m.

    Args:
        ranks: p; each holds one stage.
        microbatches: m, any number.
    """
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    rows = tuple(
        tuple(Action(kind, rank, microbatch) for kind in kinds for microbatch in range(microbatches))
        for rank in range(ranks)
    )
    return Schedule("afab", (looped_placement(ranks),), (0,) * microbatches, rows)

"""Where to cut for the shortest step: even stages are only the beginning, as ranks hold several and wait in different places."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from lightning_5d.pipeline_parallel.schedule import Schedule, flatten
from lightning_5d.pipeline_parallel.simulate import Durations, simulate
from lightning_5d.pipeline_parallel.stage.split import partition

_ACTIONS = 400_000
"""Simulated actions that a search may take: a second or two."""


def shortest_split(
    schedule: Schedule, costs: Sequence[float], first: float = 0.0, last: float = 0.0
) -> tuple[int, ...]:
    """Blocks of each stage, so that the step takes as little time as the search can find; every stage gets one at least.

    It starts from the stages whose most expensive one is cheapest (`partition`), and moves single blocks from stage to stage as
    long as the simulated step gets shorter. F, B and W are taken to cost the same.

    Args:
        schedule: The schedule that the stages run by.
        costs: Cost of each block, in any unit.
        first: What the first stage costs besides.
        last: What the last stage costs besides.

    Raises:
        ValueError: If there are fewer blocks than stages.
    """
    sizes = partition(costs, schedule.stages, first, last)
    actions = sum(1 for row in schedule.rows for _ in flatten(row))
    left = _ACTIONS // actions
    total = [0.0, *accumulate(costs)]

    def step(sizes: tuple[int, ...]) -> float:
        ends = [0, *accumulate(sizes)]
        stages = [total[high] - total[low] for low, high in pairwise(ends)]
        stages[0] += first
        stages[-1] += last
        each = tuple(cost / 3 for cost in stages)
        return simulate(schedule, Durations(each, each, each)).makespan

    shortest = step(sizes)
    better = True
    while better and left > 0:
        better = False
        for candidate in _moves(sizes):
            left -= 1
            if left <= 0:
                break
            if (takes := step(candidate)) < shortest * (1 - 1e-9):
                sizes, shortest, better = candidate, takes, True
    return sizes


def _moves(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All splits with one block moved from one stage to another."""
    found = []
    for giver, size in enumerate(sizes):
        for taker in range(len(sizes)):
            if size > 1 and taker != giver:
                moved = list(sizes)
                moved[giver] -= 1
                moved[taker] += 1
                found.append(tuple(moved))
    return found

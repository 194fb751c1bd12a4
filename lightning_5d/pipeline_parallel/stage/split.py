"""How many blocks each stage gets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def partition(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Sizes of the stages whose most expensive one is as cheap as possible; every stage gets a block.

    The exact optimum over all contiguous partitions, by dynamic programming; among equal ones the most even.

    Args:
        costs: Cost of each block, in any unit.
        stages: Number of stages, at most the number of blocks.
        first: What the first stage costs besides.
        last: What the last stage costs besides.

    Raises:
        ValueError: If there are fewer blocks than stages.
    """
    blocks = len(costs)
    if not 1 <= stages <= blocks:
        raise ValueError(f"{blocks} blocks cannot be divided among {stages} stages, one each at least.")
    total = [0.0, *accumulate(costs)]

    def cost(stage: int, low: int, high: int) -> float:
        return total[high] - total[low] + first * (stage == 0) + last * (stage == stages - 1)

    # best[b]: the largest cost, the sum of squares, and the sizes, of the stages so far with b blocks
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        found: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for high in range(stage + 1, blocks - (stages - 1 - stage) + 1):
            options = []
            for low, (worst, squares, sizes) in best.items():
                if low < high:
                    here = cost(stage, low, high)
                    options.append((max(worst, here), squares + here * here, (*sizes, high - low)))
            found[high] = min(options)
        best = found
    return best[blocks][2]

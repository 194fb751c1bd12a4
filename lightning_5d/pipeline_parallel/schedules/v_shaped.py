"""Two stages per rank in a V, weight gradients apart: ZB-V, V-Half and V-Min.

In a V, rank r holds stages r and 2p - 1 - r, so the first and the last stage are neighbours on rank 0, and every rank keeps
about as much as any other. ZB-V: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 6. V-Half and V-Min: Qi et al. 2024,
"Pipeline Parallelism with Controllable Memory", whose two steps are taken here: repeat one microbatch's pattern for
all microbatches, then let every rank run that order as early as it can, with weight gradients in the gaps.
"""

from __future__ import annotations

from itertools import product

from lightning_5d.pipeline_parallel.schedule import Action, Kind, Schedule, v_placement
from lightning_5d.pipeline_parallel.schedules.weight_gradients import fill_in_weight_gradients

INTERVAL = 6
"""Units of time between two microbatches: F, B and W of two stages."""

Steps = tuple[int, int, int, int]


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """No bubble with the activations of 1F1B.

    When F = B = W: bubble 0 for m ≥ 2p - 1 (below, (2p - 1 - m)/2 of a rank's share of F, down to m = p); every rank keeps at most
    p microbatches. As with ZB-H2 the ranks end one after the other, (p - 1)F/2 apart, which a barrier after each step
    turns into a bubble.

    Args:
        ranks: p; rank r holds stages r and 2p - 1 - r.
        microbatches: m, any number.
    """
    orders = [_zb_v_order(rank, ranks, microbatches) for rank in range(ranks)]
    return _schedule("zb_v", orders, microbatches, limit=2 * ranks)


def v_half(ranks: int, microbatches: int) -> Schedule:
    """Half the activations of 1F1B with about half its bubble.

    When F = B = W: bubble at most 3p/2 (of 1F1B's 3(p - 1)) for m ≥ p/2; every rank keeps at most ⌊p/2⌋ + 1 microbatches.

    Args:
        ranks: p; rank r holds stages r and 2p - 1 - r.
        microbatches: m, any number.
    """
    orders = _repeat((2, 1, 2, 1), ranks, microbatches)
    return _schedule("v_half", orders, microbatches, limit=2 * ((ranks + 2) // 2))


def v_min(ranks: int, microbatches: int) -> Schedule:
    """A third of the activations of 1F1B, the least a V can do with, with about two thirds of its bubble.

    When F = B = W: bubble at most 2p (of 1F1B's 3(p - 1)) for any m; every rank keeps at most ⌊(p + 4)/3⌋ microbatches. Where
    they differ, ranks wait in every microbatch, not only at the ends.

    Args:
        ranks: p; rank r holds stages r and 2p - 1 - r.
        microbatches: m, any number.
    """
    orders = _repeat((1, 1, 1, 1), ranks, microbatches)
    return _schedule("v_min", orders, microbatches, limit=2 * ((ranks + 4) // 3))


def _schedule(name: str, orders: list[list[Action]], microbatches: int, limit: int) -> Schedule:
    rows = fill_in_weight_gradients(orders, stages=2 * len(orders), limit=limit)
    return Schedule(name, (v_placement(len(orders)),), (0,) * microbatches, rows)


def _zb_v_order(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Forwards and input gradients of a rank: warm up until the V has come back, then one of each for both stages in turn."""
    down, up = rank, 2 * ranks - 1 - rank
    first, second = (Kind.FORWARD, down), (Kind.FORWARD, up)
    second_back, first_back = (Kind.INPUT_GRADIENT, up), (Kind.INPUT_GRADIENT, down)
    pattern = [first] * (2 * (ranks - rank) - 1)
    pattern += [second, first] * rank
    pattern += [second, second_back] * (ranks - rank)
    pattern += [first, first_back, second, second_back] * microbatches
    counts = dict.fromkeys(pattern, 0)
    order = []
    for kind, stage in pattern:
        if counts[kind, stage] < microbatches:
            order.append(Action(kind, stage, counts[kind, stage]))
            counts[kind, stage] += 1
    return order


def _repeat(steps: Steps, ranks: int, microbatches: int) -> list[list[Action]]:
    """For each rank, forwards and input gradients in the order that the repeated pattern gives them.

    Args:
        steps: Units of time from a rank to the next, for the forward down the V, the forward up it, the input gradient
            down and the input gradient up. Their sum is the time an activation is kept, and so the memory.
        ranks: p.
        microbatches: m.
    """
    pattern = _pattern(steps, ranks)
    orders = []
    for rank in range(ranks):
        down, up = rank, 2 * ranks - 1 - rank
        kinds = ((Kind.FORWARD, down), (Kind.FORWARD, up), (Kind.INPUT_GRADIENT, up), (Kind.INPUT_GRADIENT, down))
        timed = [
            (microbatch * INTERVAL + time, Action(kind, stage, microbatch))
            for microbatch in range(microbatches)
            for time, (kind, stage) in zip(pattern[rank], kinds, strict=True)
        ]
        orders.append([action for _, action in sorted(timed, key=lambda pair: pair[0])])
    return orders


def _pattern(steps: Steps, ranks: int) -> list[tuple[int, int, int, int]]:
    """When each rank runs the four actions of the first microbatch, so that none meets one of another microbatch.

    Waits at the three turns of the way (V's bottom, loss, V's bottom again) are the shortest that achieve it.
    """
    last = ranks - 1
    for waits in sorted(product(range(INTERVAL), repeat=3), key=sum):
        starts = [0]
        for step, wait in zip(steps, waits, strict=False):
            starts.append(starts[-1] + step * last + 1 + wait)
        pattern = [
            (
                starts[0] + steps[0] * rank,
                starts[1] + steps[1] * (last - rank),
                starts[2] + steps[2] * rank,
                starts[3] + steps[3] * (last - rank),
            )
            for rank in range(ranks)
        ]
        if all(len({time % INTERVAL for time in times}) == len(times) for times in pattern):
            return pattern
    raise ValueError(f"Steps {steps} have no pattern for {ranks} ranks that repeats every {INTERVAL} units.")

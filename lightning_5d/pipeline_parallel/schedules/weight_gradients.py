"""Where the weight gradients go, in an order of forwards and input gradients that is already fixed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lightning_5d.pipeline_parallel.schedule import Action, Kind, Row
from lightning_5d.pipeline_parallel.validate import Result, needs_of


def fill_in_weight_gradients(orders: Sequence[Sequence[Action]], stages: int, limit: int) -> tuple[Row, ...]:
    """Puts each rank's weight gradients into its gaps, oldest first, and earlier where activations would exceed a limit.

    Gaps are those of a clock on which every action takes one unit.

    Args:
        orders: For each rank, its forwards and input gradients in order.
        stages: Stages of the model.
        limit: Activations (of one stage and one microbatch) that a rank may keep; before a forward that would exceed it
            comes a weight gradient, if one is there.

    Raises:
        ValueError: If the orders wait for each other in a circle.
    """
    pending: list[deque[Action]] = [deque() for _ in orders]
    rows: list[list[Action]] = [[] for _ in orders]
    position = [0] * len(orders)
    live = [0] * len(orders)
    made: set[Result] = set()
    left = sum(map(len, orders))
    while left or any(pending):
        now = []
        for rank, order in enumerate(orders):
            action = order[position[rank]] if position[rank] < len(order) else None
            full = action is not None and action.kind is Kind.FORWARD and live[rank] >= limit and bool(pending[rank])
            if action is None or full or not made.issuperset(needs_of(action, stages)):
                if pending[rank]:
                    now.append((rank, pending[rank].popleft()))
                    live[rank] -= 1
                continue
            now.append((rank, action))
            position[rank] += 1
            left -= 1
            if action.kind is Kind.FORWARD:
                live[rank] += 1
            else:
                pending[rank].append(Action(Kind.WEIGHT_GRADIENT, action.stage, action.microbatch))
        if not now:
            raise ValueError("The forwards and input gradients wait for each other in a circle.")
        for rank, action in now:
            rows[rank].append(action)
            made.add((action.kind.value, action.stage, action.microbatch))
    return tuple(map(tuple, rows))

"""Activation checkpointing to a budget: what each module saves is measured once, and the costliest part of it is kept.

The choice is a knapsack for each module. Items are the operations of its forward; an item weighs the bytes it returns and is
worth the floating-point operations that running it again would take. The capacity is the module's share of the budget, plus
what modules before it have left over, less its inputs, which are kept in any case. A module whose share holds all it saves
is not checkpointed at all.

Source: the same problem as `torch.compile` solves for `activation_memory_budget` (torch/_functorch/partitioners.py, after
Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016), whose solver is used here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_5d.recomputation import KEEP_ALL, KEEP_INPUTS, Rerun
from lightning_5d.saved_activations import Agree, Measured, measure
from lightning_5d.saved_operations import ChosenOperations

_STEPS = 1000
"""Into how many parts a capacity is divided; weights are rounded up, so that a choice never exceeds it."""


@dataclass(frozen=True)
class Choice:
    """What one module keeps: everything (``keys`` is None) or its inputs and the results of some operations."""

    keys: frozenset[tuple[str, int]] | None
    size: int

    def policy(self) -> Any:
        """The policy for one call."""
        if self.keys is None:
            return KEEP_ALL
        return ChosenOperations(self.keys) if self.keys else KEEP_INPUTS


class MemoryBudget:
    """The budget of all checkpointed modules of a model, spent in the order they first run.

    Attributes:
        share: Of the bytes saved without checkpointing, those that may be.
        saved: Bytes saved without checkpointing, of the modules seen so far.
        kept: Bytes that are kept instead.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.saved = self.kept = 0

    def spend(self, measured: Measured) -> Choice:
        """The choice for the next module."""
        left_over = self.share * self.saved - self.kept
        choice = choose(measured, self.share * measured.saved + left_over)
        self.saved += measured.saved
        self.kept += choice.size
        return choice


class BudgetKeeping:
    """What one module keeps under a budget; measured in its first call under gradients.

    The decision depends on shapes only, never on time measured: ranks with the same batch must decide alike.
    """

    def __init__(self, module: nn.Module, budget: MemoryBudget) -> None:
        self.module, self.budget = module, budget
        self.choice: Choice | None = None

    def policy(self, rerun: Rerun, agree: Agree) -> Any:
        """The policy of the choice that was made in the first call."""
        if self.choice is None:
            with rerun() as (run, inputs):
                self.choice = self.budget.spend(agree(measure(run, inputs, self.module)))
        return self.choice.policy()

    def traced(self) -> Any:
        """Inputs only: a compiled module cannot be measured (`ActivationCheckpointing` refuses one that it can see)."""
        return KEEP_INPUTS


def choose(measured: Measured, capacity: float) -> Choice:
    """What a module keeps in at most ``capacity`` bytes, or as little as it can.

    Returns:
        The choice that leaves the least work to be done again.
    """
    if measured.saved <= capacity:
        return Choice(None, measured.saved)
    room = capacity - measured.inputs
    items = [item for item in measured.operations if 0 < item.size <= room]
    if not items:
        return Choice(frozenset(), measured.inputs)
    # Private; checked with torch 2.13. It rounds to 1/10000 of the unit, hence whole steps of 1/1000.
    from torch._functorch._activation_checkpointing.knapsack import dp_knapsack

    weights = [math.ceil(item.size / room * _STEPS) / _STEPS for item in items]
    largest = max(item.work for item in items)
    _, chosen, _ = dp_knapsack(weights, [item.work / largest for item in items], 1.0)
    keys = frozenset(items[index].key for index in chosen)
    return Choice(keys, measured.inputs + sum(items[index].size for index in chosen))

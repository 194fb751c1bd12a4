"""What a module has that an expert axis cannot do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn

from lightning_5d.data_parallel.compatibility import hooked_parameters
from lightning_5d.expert_parallel.found import FoundExperts
from lightning_5d.parallelism import Problem

if TYPE_CHECKING:
    from lightning_5d.expert_parallel.expert import ExpertParallel


def module_problems(module: nn.Module, found: Sequence[FoundExperts], plugin: ExpertParallel) -> list[Problem]:
    """What keeps the experts of a module from being spread.

    Args:
        module: The user's module.
        found: Its experts.
        plugin: The settings.
    """
    from lightning_5d.expert_parallel.survey import near_misses

    asked = plugin.short()
    misses = near_misses(module)
    if not found:
        what = f"{asked}: {type(module).__name__} has no MoE layer whose experts could be spread."
        if not misses:
            fix = "Leave ExpertParallel out, or use a model with experts, such as Mixtral, Qwen3-MoE or model=moe_tiny."
            return [Problem(what, fix)]
    problems = [Problem(f"{asked}: {miss.what}", miss.fix) for miss in misses]
    for each in found:
        if each.top_k is not None and each.top_k > each.count:
            what = f"{each.name} sends each token to {each.top_k} experts and has {each.count}."
            problems.append(Problem(what, f"At most {each.count} work."))
        if plugin.tensor > 1:
            problems += _part_problems(each, plugin.tensor)
    if plugin.size > 1 or plugin.tensor > 1:
        problems += _replaced_problems(module, found, asked)
    return problems


def _replaced_problems(module: nn.Module, found: Sequence[FoundExperts], asked: str) -> list[Problem]:
    """What holds on to the weights in whose place each rank's experts come."""
    problems = []
    hooked = [f"{each.name}.{name}" for each in found for name in hooked_parameters(each.module)]
    if hooked:
        what = f"{asked} puts each rank's experts in the place of these weights, whose hooks would be lost: {', '.join(hooked)}."
        problems.append(Problem(what, "Change gradients in `on_before_optimizer_step`."))
    for callback in getattr(getattr(module, "_trainer", None), "callbacks", ()):
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            what = (
                f"{type(callback).__name__} averages whole weights, and with {asked} a rank has a part of the experts."
            )
            problems.append(Problem(what, "Average the weights of saved checkpoints."))
    return problems


def _part_problems(each: FoundExperts, parts: int) -> list[Problem]:
    if not each.tensor_dims:
        what = (
            f"ExpertParallel(tensor={parts}): the experts of {each.name} ({type(each.module).__name__}) cannot be cut."
        )
        return [Problem(what, "Use tensor=1: whole experts on all ranks.")]
    problems = []
    for key, dim in each.tensor_dims.items():
        rows = getattr(each.module, key).shape[dim] // (2 if key in each.halves else 1)
        if rows % parts:
            works = [n for n in range(1, parts) if rows % n == 0]
            what = f"ExpertParallel(tensor={parts}): {parts} does not divide the {rows} features of an expert of {each.name}."
            problems.append(Problem(what, f"A tensor axis of {works[-1]} does; or use tensor=1."))
            break
    return problems

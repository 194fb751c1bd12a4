"""What a module has that an expert axis cannot do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn

from lightning_5d.data_parallel.compatibility import hooked_parameters, listed
from lightning_5d.expert_parallel.found import FoundExperts
from lightning_5d.parallelism import Problem

if TYPE_CHECKING:
    from lightning_5d.expert_parallel.expert import ExpertParallel

_LAYER = re.compile(r"\.\d+\.")


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
            fix = (
                "Leave ExpertParallel out, or use a model with experts, such as Mixtral, Qwen3-MoE or model=moe_tiny. Experts of your own are found if they"
                " are a module named experts, or of a class named …Experts, that is called as experts(hidden, index, weights), and whose stacked weights have"
                " the experts as their first dimension (docs/expert_parallel.md)."
            )
            return [Problem(what, fix)]
    problems = [Problem(f"{asked}: {miss.what}", miss.fix) for miss in _once(misses)]
    for each in found:
        if each.top_k is not None and each.top_k > each.count:
            what = f"{each.name} sends each token to {each.top_k} experts and has {each.count}."
            problems.append(Problem(what, f"At most {each.count} work."))
        if plugin.tensor > 1:
            problems += _part_problems(each, plugin.tensor)
    if plugin.size > 1 or plugin.tensor > 1:
        problems += _weight_problems(module, found, asked)
        problems += _callback_problems(module, asked)
    return problems


def _once(problems: Sequence[Problem]) -> Iterator[Problem]:
    """Those of layers that are alike once, for the first of them."""
    alike: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        alike.setdefault((_LAYER.sub(".*.", problem.what), problem.fix), []).append(problem)
    for first, *others in alike.values():
        so = f" So it is with {len(others)} more of its kind." if others else ""
        yield Problem(f"{first.what}{so}", first.fix)


def _callback_problems(module: nn.Module, asked: str) -> Iterator[Problem]:
    for callback in getattr(getattr(module, "_trainer", None), "callbacks", ()):
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            name = type(callback).__name__
            what = f"{name} averages whole weights, and with {asked} a rank has a part of the experts."
            yield Problem(what, "Average the weights of saved checkpoints.")


def _weight_problems(module: nn.Module, found: Sequence[FoundExperts], asked: str) -> Iterator[Problem]:
    """What would be lost when each rank's part takes the place of a stacked weight."""
    stacked = {f"{each.name}.{key}" if each.name else key for each in found for key in each.stacked}
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for tied in names.values():
        here = [name for name in tied if name in stacked]
        # Two names of one module are no two weights.
        places = {(id(module.get_submodule(name.rpartition(".")[0])), name.rpartition(".")[2]) for name in tied}
        if here and len(places) > 1:
            what = f"{asked}: {' and '.join(tied)} are one weight, and each rank's part of the experts would be another one in each place."
            yield Problem(
                what, "Share the whole module of experts (layers[1].experts = layers[0].experts), or untie them."
            )
    hooked = [name for name in hooked_parameters(module) if name in stacked]
    if hooked:
        what = f"{asked}: hooks on these parameters would be lost when each rank's part takes their place: {listed(hooked)}."
        yield Problem(what, "Change gradients in `on_before_optimizer_step`.")


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

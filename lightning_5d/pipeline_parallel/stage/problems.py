"""Whether a module can be cut as asked for, and why not; and the layout if it can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_5d.parallelism import Problem, raise_problems
from lightning_5d.pipeline_parallel.stage.costs import StageCosts, costs_problems, estimate_costs
from lightning_5d.pipeline_parallel.stage.layout import (
    Anatomy,
    StageLayout,
    dissect,
    list_sizes,
    main_list,
    owners_of,
)
from lightning_5d.pipeline_parallel.stage.split import partition
from lightning_5d.plan import ParallelPlan

Split = str | Sequence[int]
SPLITS = ("even", "blocks")
_SECOND_LIST = 0.25


def layout_of(
    module: nn.Module, plan: ParallelPlan, stages: int, split: Split = "even", costs: StageCosts | None = None
) -> StageLayout:
    """Which stage holds what.

    Args:
        module: The user's LightningModule, whole.
        plan: Where it may be cut, as `find_plan` gives it.
        stages: Number of stages, over all ranks.
        split: ``"even"`` for stages of equal cost, ``"blocks"`` for equal numbers of blocks, or the number of blocks of each
            stage; 0 for a stage without one.
        costs: What ``"even"`` goes by; estimated from the sizes of weights if ``None``.

    Raises:
        MisconfigurationException: If it cannot be cut so; see `layout_problems`.
    """
    raise_problems(layout_problems(module, plan, stages, split, costs))
    anatomy = dissect(module, plan)
    sizes = sizes_of(module, anatomy, stages, split, costs)
    return StageLayout(anatomy, sizes, owners_of(module, anatomy.places, sizes))


def sizes_of(
    module: nn.Module, anatomy: Anatomy, stages: int, split: Split, costs: StageCosts | None = None
) -> tuple[int, ...]:
    """How many blocks each stage gets."""
    if split == "blocks":
        return partition([1.0] * len(anatomy.blocks), stages)
    if split == "even":
        costs = costs or estimate_costs(module, anatomy)
        return partition([costs.blocks[name] for name in anatomy.blocks], stages, costs.before, costs.after)
    return tuple(int(size) for size in split)


def layout_problems(
    module: nn.Module, plan: ParallelPlan, stages: int, split: Split = "even", costs: StageCosts | None = None
) -> list[Problem]:
    """Why a module cannot be cut into stages as asked for; empty if it can."""
    problems = _module_problems(module)
    try:
        anatomy = dissect(module, plan)
    except ValueError as error:
        return [*problems, Problem(f"The model cannot be cut: {error}", "Give FiveD(plan=ParallelPlan([...])).")]
    if not anatomy.blocks:
        what = f"{type(module).__name__} has no list of blocks of one class, so there is nothing to cut."
        fix = "Name the blocks: FiveD(plan=ParallelPlan(['model.layers.*']))."
        return [*problems, Problem(what, fix)]
    return [
        *problems,
        *_list_problems(module, plan, anatomy),
        *split_problems(len(anatomy.blocks), stages, split),
        *([] if costs is None else costs_problems(costs, anatomy.blocks)),
    ]


def split_problems(blocks: int, stages: int, split: Split) -> list[Problem]:
    """What is wrong with a split of some number of blocks into stages."""
    if isinstance(split, str):
        if split not in SPLITS:
            return [
                Problem(
                    f"split={split!r} is unknown.",
                    "Use 'even', 'blocks', or a list with each stage's number of blocks.",
                )
            ]
        if blocks < stages:
            return [
                Problem(
                    f"{stages} stages are more than the model's {blocks} blocks.",
                    f"Use at most {blocks} stages, or leave some without blocks: split={_with_empty(blocks, stages)}.",
                )
            ]
        return []
    sizes: list[Any] = list(split)
    nearest = _nearest(sizes, blocks, stages)
    if any(isinstance(size, bool) or not isinstance(size, int) for size in sizes):
        return [Problem(f"split={sizes} has entries that are not whole numbers.", f"The nearest is {nearest}.")]
    if any(size < 0 for size in sizes):
        return [Problem(f"split={sizes} has negative entries.", f"The nearest is {nearest}.")]
    if len(sizes) != stages:
        return [Problem(f"split={sizes} is for {len(sizes)} stages, but there are {stages}.", f"Use, say, {nearest}.")]
    if sum(sizes) != blocks:
        what = f"split={sizes} is for {sum(sizes)} blocks, but the model has {blocks}."
        return [Problem(what, f"The nearest is {nearest}.")]
    return []


def _with_empty(blocks: int, stages: int) -> list[int]:
    """A split of few blocks: the last stage, then the first, are the ones without, since they have other work."""
    sizes = [1] * blocks + [0] * (stages - blocks)
    if stages - blocks >= 2:
        sizes = [0, *sizes[:-1]]
    return sizes


def _nearest(sizes: Sequence[Any], blocks: int, stages: int) -> list[int]:
    whole = [max(int(size), 0) if isinstance(size, int | float) else 0 for size in sizes]
    if len(whole) != stages or not sum(whole):
        return list(partition([1.0] * blocks, stages)) if stages <= blocks else _with_empty(blocks, stages)
    # In proportion; what rounding leaves over goes to those that lost most.
    shares = [size * blocks / sum(whole) for size in whole]
    result = [int(share) for share in shares]
    lost = sorted(range(stages), key=lambda stage: result[stage] - shares[stage])
    for stage in lost[: blocks - sum(result)]:
        result[stage] += 1
    return result


def _module_problems(module: nn.Module) -> list[Problem]:
    problems = []
    kind = type(module).__name__
    if not getattr(module, "automatic_optimization", True):
        problems.append(
            Problem(
                f"{kind} optimizes by hand, and a step that calls backward by itself cannot be cut into stages.",
                "Set automatic_optimization = True, or leave PipelineParallel out.",
            )
        )
    if isinstance(module, pl.LightningModule) and type(module).backward is not pl.LightningModule.backward:
        problems.append(
            Problem(
                f"{kind} overrides `backward`, which only the last stage could call with a loss.",
                "Take the override out (hooks such as on_after_backward stay), or leave PipelineParallel out.",
            )
        )
    return problems


def _list_problems(module: nn.Module, plan: ParallelPlan, anatomy: Anatomy) -> list[Problem]:
    problems = []
    objects = [module.get_submodule(name) for name in anatomy.blocks]
    if len({id(block) for block in objects}) < len(objects):
        problems.append(
            Problem(
                "Some blocks are one and the same module, used several times.",
                "A stage cannot run twice in a step; leave PipelineParallel out.",
            )
        )
    if anatomy.between:
        problems.append(
            Problem(
                f"{', '.join(anatomy.between)} has weights and lies between two blocks of the plan ({plan.source}).",
                "Name it in the plan: among the blocks, or in before or after.",
            )
        )
    if plan.chosen:
        return problems
    sizes = list_sizes(module, plan.block_names(module))
    main = main_list(module, plan.block_names(module))
    second = {name: size for name, size in sizes.items() if name != main and size >= _SECOND_LIST * sizes[main]}
    if second:
        lists = ", ".join(f"{name or 'the model itself'} ({size:,} weights)" for name, size in sizes.items())
        choice = f"ParallelPlan(blocks=['{main}.*'])" if main else "ParallelPlan(blocks=['*'])"
        problems.append(
            Problem(
                f"{type(module).__name__} has {1 + len(second)} lists of blocks in sequence: {lists}. It is not clear where to"
                " cut, and what runs between two lists would be on every stage.",
                f"Choose one, whose neighbours then belong to the first or last stage: FiveD(plan={choice}).",
            )
        )
    return problems

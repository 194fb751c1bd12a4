"""What blocks and the modules around them cost, estimated or measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_5d.expert_parallel.survey import found_experts
from lightning_5d.parallelism import Problem
from lightning_5d.pipeline_parallel.stage.layout import Anatomy


@dataclass(frozen=True)
class StageCosts:
    """What parts of a model cost for one microbatch, in any one unit.

    Attributes:
        blocks: Cost of each block by name.
        before: Cost of all that runs before the blocks.
        after: Cost of all that runs after the blocks.
    """

    blocks: Mapping[str, float]
    before: float = 0.0
    after: float = 0.0


def estimate_costs(module: nn.Module, anatomy: Anatomy) -> StageCosts:
    """Costs from the sizes of weights: one unit for each multiplication that a token takes in a step.

    A matrix is multiplied once in a forward, once for the gradient of its input and, if it is trained, once for its own. An
    embedding is looked up, which costs nothing; an output layer costs vocabulary times width. Of stacked experts a token meets only as many as it
    is sent to. Attention costs its width for each token
    that is looked at. How many those are nobody knows before the first batch: sequences are taken to have 512 tokens, of which half are
    looked at. In wide models that is little beside the matrices; for long sequences in narrow ones, measure (`measure_costs`).
    """
    return StageCosts(
        {name: _work(module.get_submodule(name)) for name in anatomy.blocks},
        sum(_work(module.get_submodule(name)) for name in anatomy.outer("before")),
        sum(_work(module.get_submodule(name)) for name in anatomy.outer("after")),
    )


def costs_problems(costs: StageCosts, blocks: Sequence[str]) -> list[Problem]:
    """What is wrong with costs for a module with these blocks."""
    fix = "Measure this very module: PipelineParallel(costs=measure_costs(module, microbatch))."
    if set(costs.blocks) != set(blocks):
        wrong = sorted(set(costs.blocks).symmetric_difference(blocks))
        what = f"costs are for {len(costs.blocks)} blocks, and the model has {len(blocks)}; {wrong[0]} is in one of them only."
        return [Problem(what, fix)]
    numbers = {**costs.blocks, "before": costs.before, "after": costs.after}
    bad = [f"{name}: {number}" for name, number in numbers.items() if not 0 <= number < float("inf")]
    return [Problem(f"costs have numbers that are no costs: {', '.join(bad)}.", fix)] if bad else []


_LOOKED_AT = 512
"""A token meets half of 512 tokens on average, in two products: with keys, and of values."""


def _work(module: nn.Module) -> float:
    attention = 3.0 * _LOOKED_AT * sum(map(_attention_width, _attentions(module)))
    return attention + _matmul_work(module)


def _attentions(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that call themselves attention and have matrices."""
    name = type(module).__name__.lower()
    if ("attention" in name or "attn" in name) and _attention_width(module):
        yield module
        return
    for child in module.children():
        yield from _attentions(child)


def _attention_width(module: nn.Module) -> int:
    # The projections of queries and of results are square, or nearly.
    return max((min(p.shape) for p in module.parameters() if p.ndim == 2), default=0)


def _matmul_work(module: nn.Module) -> float:
    met = {id(found.module): (found.top_k or found.count) / found.count for found in found_experts(module)}
    work = 0.0
    for inner in module.modules():
        if isinstance(inner, nn.Embedding | nn.EmbeddingBag):
            continue
        for parameter in inner.parameters(recurse=False):
            if parameter.ndim >= 2:
                work += parameter.numel() * met.get(id(inner), 1.0) * (3 if parameter.requires_grad else 2)
    return work

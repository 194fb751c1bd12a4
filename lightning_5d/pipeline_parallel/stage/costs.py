"""What blocks and the modules around them cost, estimated or measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

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
    """Costs from the sizes of weights: one unit for each multiplication that a token takes in a forward.

    A matrix is multiplied once in a forward, once for the gradient of its input and, if it is trained, once for its own. An
    embedding is looked up, which costs nothing; an output layer costs vocabulary times width.
    """
    return StageCosts(
        {name: _matmul_work(module.get_submodule(name)) for name in anatomy.blocks},
        sum(_matmul_work(module.get_submodule(name)) for name in anatomy.outer("before")),
        sum(_matmul_work(module.get_submodule(name)) for name in anatomy.outer("after")),
    )


def _matmul_work(module: nn.Module) -> float:
    work = 0.0
    for inner in module.modules():
        if isinstance(inner, nn.Embedding | nn.EmbeddingBag):
            continue
        for parameter in inner.parameters(recurse=False):
            if parameter.ndim >= 2:
                work += parameter.numel() * (3 if parameter.requires_grad else 2)
    return work

"""Stages of a module in one process: copies of it, each cut for one rank, and payloads passed on by hand."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_5d.pipeline_parallel.stage import Boundary, Cut, Finished, StageLayout, layout_of
from lightning_5d.plan import ParallelPlan, find_plan


class Pipeline:
    """A module cut for some ranks; `ranks` says which stages each has."""

    def __init__(
        self,
        module: nn.Module,
        ranks: Sequence[Sequence[int]],
        split: Any = "even",
        plan: ParallelPlan | None = None,
    ) -> None:
        stages = sum(len(rank) for rank in ranks)
        self.layout: StageLayout = layout_of(module, find_plan(module, plan), stages, split)
        self.modules = [copy.deepcopy(module) for _ in ranks]
        self.cuts = [Cut(copied, self.layout, rank) for copied, rank in zip(self.modules, ranks, strict=True)]
        self.home = {stage: rank for rank, here in enumerate(ranks) for stage in here}
        self.outlines: dict[int, Any] = {}
        for cut in self.cuts:
            cut.arm()

    def forward(self, *args: Any, method: str = "training_step") -> tuple[Any, list[tuple[Any, Any]]]:
        """Runs all stages; what the step returned, and for each stage what it received and handed on."""
        received, records, outline = None, [], None
        for stage in range(self.layout.stages):
            rank = self.home[stage]
            cut, module = self.cuts[rank], self.modules[rank]
            if stage and rank not in self.outlines:
                self.outlines[rank] = pickle.loads(pickle.dumps(outline))
            result = cut.run(
                stage, getattr(module, method), args, {}, received, self.outlines.get(rank) if stage else None
            )
            if stage == 0:
                outline = cut.outline()
                if self.layout.stages > 1:
                    self.outlines.setdefault(rank, outline)
            if isinstance(result, Finished):
                assert stage == self.layout.stages - 1
                records.append((received, result.output))
                return result.output, records
            assert isinstance(result, Boundary)
            records.append((received, result.payload))
            received = tree_map(sent, result.payload)
        raise AssertionError("the last stage did not finish")

    def backward(self, records: list[tuple[Any, Any]]) -> None:
        """Runs all backwards."""
        gradients: list[Tensor | None] = []
        for received, output in reversed(records):
            if isinstance(output, Tensor) and not gradients:
                output.backward()
            else:
                pairs = [
                    (leaf, gradient)
                    for leaf, gradient in zip(tensors(output), gradients, strict=True)
                    if gradient is not None and leaf.requires_grad
                ]
                if pairs:
                    torch.autograd.backward([leaf for leaf, _ in pairs], [gradient for _, gradient in pairs])
            gradients = [leaf.grad for leaf in tensors(received)]

    def gradients(self) -> dict[str, Tensor]:
        """Gradients by name, those of shared weights added up over ranks."""
        total: dict[str, Tensor] = {}
        for module in self.modules:
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    total[name] = total.get(name, 0) + parameter.grad
        return total


def quiet(module: Any) -> Any:
    """A LightningModule that logs nothing, as there is no Trainer."""
    module.log = lambda *args, **kwargs: None
    return module


def sent(leaf: Any) -> Any:
    """A tensor as the next stage gets it."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def tensors(structure: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(structure) if isinstance(leaf, Tensor)]


def assert_same_gradients(
    module: nn.Module, batches: Sequence[Any], ranks: Sequence[Sequence[int]], **options: Any
) -> Pipeline:
    """Loss and gradients of some microbatches equal those of the whole module."""
    pipeline = Pipeline(module, ranks, **options)
    for index, batch in enumerate(batches):
        expected = module.training_step(copy.deepcopy(batch), index)  # type: ignore[operator]
        expected.backward()
        loss, records = pipeline.forward(copy.deepcopy(batch), index)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        pipeline.backward(records)
    found = pipeline.gradients()
    named = {n: p.grad for n, p in module.named_parameters(remove_duplicate=False) if p.grad is not None}
    reference = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    assert set(found) <= set(named)
    for name, gradient in reference.items():
        same = [n for n in found if named[n] is gradient]
        total = sum(found[n] for n in same)
        assert same, f"{name} has no gradient"
        scale = gradient.abs().max().clamp_min(1e-12)
        assert ((total - gradient).abs().max() / scale) < 2e-6, name
    return pipeline

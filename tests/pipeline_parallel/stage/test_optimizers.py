"""Optimizers of weights that a rank does not hold."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Muon, Optimizer

from lightning_5d.pipeline_parallel.stage import is_placeholder
from tests.modules import TinyLM
from tests.pipeline_parallel.stage.pipelines import Pipeline


def by_decay(module: Any, named: bool) -> Optimizer:
    """Two groups: matrices and the rest; the first stage has all of them frozen."""
    trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    groups = [[item for item in trained if (item[1].ndim > 1) is wide] for wide in (True, False)]
    return AdamW([{"params": group if named else [p for _, p in group]} for group in groups])


MADE: dict[str, Callable[[Any], Optimizer]] = {
    "a module's": lambda m: AdamW(m.head.parameters()),
    "trained": lambda m: SGD((p for p in m.parameters() if p.requires_grad), lr=0.1),
    "a weight": lambda m: AdamW([m.head.weight]),
    "groups": lambda m: AdamW([{"params": m.head.parameters()}, {"params": iter(m.layers[3].parameters()), "lr": 1.0}]),
    "some groups": lambda m: AdamW([{"params": m.embed.parameters(), "lr": 0.5}, {"params": m.head.weight}]),
    "by name": lambda m: by_decay(m, named=True),
    "by size": lambda m: by_decay(m, named=False),
    "matrices": lambda m: Muon([m.head.weight]),
}


def stages(frozen: bool = True) -> Pipeline:
    module = TinyLM(layers=4)
    if frozen:
        module.embed.requires_grad_(False)
        module.layers[:2].requires_grad_(False)
    return Pipeline(module, [(0,), (1,)], split=[2, 2])


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_an_optimizer_may_be_made_of_what_is_on_another_rank(make: Callable[[Any], Optimizer]) -> None:
    pipeline = stages()
    whole = make(TinyLM(layers=4))
    for cut, module in zip(pipeline.cuts, pipeline.modules, strict=True):
        names = [*dict(module.named_parameters())], [*module.state_dict()]
        with cut.optimizer_context():
            optimizer = make(module)
        assert len(optimizer.param_groups) == len(whole.param_groups)
        for group, alone in zip(optimizer.param_groups, whole.param_groups, strict=True):
            assert {k: v for k, v in group.items() if "param" not in k} == {
                k: v for k, v in alone.items() if "param" not in k
            }
            real = [p for p in group["params"] if not is_placeholder(p)]
            assert real or len(group["params"]) == 1
            assert {*map(id, real)} <= {*map(id, module.parameters())}
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert not any(is_placeholder(p) for p in optimizer.state)
        assert names == ([*dict(module.named_parameters())], [*module.state_dict()])


def test_the_same_optimizer_is_refused_before_and_after() -> None:
    pipeline = stages()
    before = Optimizer.__init__
    with pipeline.cuts[0].optimizer_context():
        AdamW(pipeline.modules[0].head.parameters(), fused=True).step()
    assert Optimizer.__init__ is before
    with pytest.raises(ValueError, match="empty parameter list"):
        AdamW(pipeline.modules[0].head.parameters())
    with pytest.raises(AttributeError, match="this rank holds nothing of it"):
        AdamW([pipeline.modules[0].head.weight])
    with Pipeline(TinyLM(layers=4), [(0,)]).cuts[0].optimizer_context(), pytest.raises(ValueError, match="empty"):
        AdamW([])

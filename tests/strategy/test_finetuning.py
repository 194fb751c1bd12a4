"""Weights that a callback unfreezes and gives to the optimizer during the run."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch.optim import Optimizer

from lightning_5d import ExpertParallel, FiveD, TensorParallel, ZeRO
from tests.expert_parallel.test_training import mixture
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, Dealt, Rows, WholeRecord, apart, decoder
from tests.trainers import quiet


class _Unfreezing(BaseFinetuning):
    """The first layer, with its experts, from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.added = 0

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(next(pl_module.children()).layers[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(next(pl_module.children()).layers[0], optimizer, lr=0.05)
            self.added = len(optimizer.param_groups[1]["params"])


def _fit(rank: int, make: Callable[[], Any], plugins: tuple[Any, ...]) -> dict[str, Any]:
    record, unfreezing, module = WholeRecord(), _Unfreezing(), make()
    module.configure_optimizers = lambda: torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    chosen: dict[str, Any] = {"devices": 2, "strategy": FiveD(*plugins)} if plugins else {"devices": 1}
    common: dict[str, Any] = {"use_distributed_sampler": False, "max_epochs": 2, "precision": "64-true"}
    quiet(callbacks=[record, unfreezing], **common, **chosen).fit(module, Dealt(Rows(8, 6), 4))
    assert unfreezing.added
    return {**record(), "added": unfreezing.added}


@pytest.mark.parametrize(
    ("make", "plugins"),
    [
        (mixture(), (ExpertParallel(2), ZeRO(stage=1))),
        (mixture(), (ExpertParallel(2), ZeRO(stage=3))),
        (decoder(), (TensorParallel(2), ZeRO(stage=1))),
    ],
    ids=["experts", "experts, shards", "tensor"],
)
def test_unfrozen_weights_are_those_of_one_process(
    ranks: RankPool, make: Callable[[], Any], plugins: tuple[Any, ...]
) -> None:
    found = ranks(2, partial(_fit, make=make, plugins=plugins), **SEPARATE)
    expected = _fit(0, make, ())
    assert {each["added"] for each in found} == {expected["added"]}
    differences = apart(found, expected, 1e-6)
    assert max(differences.values()) < 1e-9, differences

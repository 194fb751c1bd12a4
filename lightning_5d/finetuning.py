"""Lightning's finetuning callbacks, with weights that lie over ranks."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_5d.checkpoint.forms import whole_tensor
from lightning_5d.replaced_functions import replaced_wholly


@contextmanager
def whole_weights_compared() -> Generator[None, None, None]:
    """Inside, `BaseFinetuning` sees which weights an optimizer has already, whatever ranks they lie over.

    It compares values (checked with lightning 2.6.6), and `torch.equal` raises for DTensors of several meshes or numbers of dimensions.
    """
    with replaced_wholly(BaseFinetuning.filter_on_optimizer, _not_in):
        yield


def _not_in(optimizer: Optimizer, params: Iterable[Tensor]) -> list[Tensor]:
    """Those of the parameters that equal none of an optimizer's, as one process finds them; all ranks call it together."""
    present = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    params = list(params)
    left = [parameter for parameter in params if not any(_equal(other, parameter) for other in present)]
    if len(left) < len(params):
        rank_zero_warn(
            f"{len(params) - len(left)} of the weights to be unfrozen are in a group of the optimizer already, or equal one that is, and"
            " are skipped. Give the optimizer only weights that train from the start: filter(lambda p: p.requires_grad, self.parameters())."
        )
    return left


def _equal(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    return one.shape == other.shape and torch.equal(whole_tensor(one), whole_tensor(other))

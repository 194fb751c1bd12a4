"""Lightning's finetuning callbacks, with weights that lie over ranks."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_5d.checkpoint.forms import whole_tensor
from lightning_5d.gradients import values_of
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
    # Of all pairs that lie alike each rank compares its parts, and one collective tells where all of them are equal.
    equal = torch.tensor([[_parts_equal(one, other) for other in present] for one in params], dtype=torch.int32)
    if dist.is_initialized() and equal.numel():
        place = values_of(params[0]).device
        equal = equal.to(place)
        dist.all_reduce(equal, op=dist.ReduceOp.MIN)
    left = [
        one
        for one, flags in zip(params, equal.tolist(), strict=True)
        if not any(flags) and not any(_equal_elsewhere(one, other) for other in present)
    ]
    if len(left) < len(params):
        rank_zero_warn(
            f"{len(params) - len(left)} of the weights to be unfrozen are in a group of the optimizer already, or equal one that is, and"
            " are skipped. Give the optimizer only weights that train from the start: filter(lambda p: p.requires_grad, self.parameters())."
        )
    return left


def _parts_equal(one: Tensor, other: Tensor) -> bool:
    return one is other or (_lie_alike(one, other) and torch.equal(values_of(one), values_of(other)))


def _equal_elsewhere(one: Tensor, other: Tensor) -> bool:
    """Whether tensors are equal that lie over ranks in different ways, which is rare among those of one shape."""
    return (
        one.shape == other.shape and not _lie_alike(one, other) and torch.equal(whole_tensor(one), whole_tensor(other))
    )


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    if not isinstance(one, DTensor) or not isinstance(other, DTensor):
        return one.shape == other.shape and not isinstance(one, DTensor) and not isinstance(other, DTensor)
    return (one.shape, one.device_mesh, one.placements) == (other.shape, other.device_mesh, other.placements)

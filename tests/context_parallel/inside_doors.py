"""Doors around the plainest attention, without a Trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_5d.context_parallel.cut import Balance, SequenceCut
from lightning_5d.context_parallel.doors import Doors
from lightning_5d.context_parallel.redirect import Redirect
from lightning_5d.tensor_parallel.axis import open_axis
from tests.context_parallel.by_gathering import GatheredAttention


def doors_of(module: nn.Module, *, contiguous: bool = False, **options: Any) -> Doors:
    """The doors of a module on all ranks of the pool."""
    axis = open_axis(dist.group.WORLD)  # type: ignore[arg-type]
    balance: Balance = "contiguous" if contiguous else "zigzag"
    around = Redirect(GatheredAttention(axis)).inside
    return Doors(module, axis, lambda length: SequenceCut(length, axis.size, balance), around, **options)


def averaged(module: nn.Module) -> dict[str, Tensor]:
    """Gradients, as data parallelism over the ranks gives them."""
    found = {}
    for name, parameter in module.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(grad)
        found[name] = grad / dist.get_world_size()
    return found


Step = Callable[[Any, Any], Any]


def compare(module: nn.Module, step: Step, batch: Any, outside: Sequence[str] = (), **options: Any) -> Any:
    """Asserts that a step in doors, forward and backward, is that of one process; returns what it returned.

    Args:
        module: Its parameters get gradients.
        step: Computes the loss of the module and the batch.
        batch: The same on all ranks.
        outside: Parameters that are used at the user's level, whose gradients are whole on every rank by themselves.
        options: Of the doors.
    """
    reference = copy.deepcopy(module)
    whole = step(reference, batch)
    whole.backward()
    doors = doors_of(module, **options)
    try:
        with doors.step((batch, 0), {}):
            loss = step(module, batch)
            loss.backward()
        assert doors.inside is None
    finally:
        doors.close()
    torch.testing.assert_close(loss.detach(), whole.detach(), rtol=1e-5, atol=1e-6)
    for name in outside:
        mine, expected = (dict(one.named_parameters())[name].grad for one in (module, reference))
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    for name, grad in averaged(module).items():
        expected = dict(reference.named_parameters())[name].grad
        expected = torch.zeros_like(grad) if expected is None else expected
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    return loss


def tokens(rows: int, length: int, vocabulary: int = 13, seed: int = 1) -> Tensor:
    """Token ids."""
    return torch.randint(1, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))

"""Runs the same expression on whole sequences and on those that ranks hold the tokens of."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_5d.context_parallel.cut import Balance, SequenceCut
from lightning_5d.context_parallel.shown import SequenceShard
from lightning_5d.context_parallel.step_sequence import StepSequence
from lightning_5d.shown import ShownTensor
from lightning_5d.tensor_parallel.axis import CollectiveAxis


def sequence(length: int, balance: Balance = "zigzag", group: Any = None) -> StepSequence:
    group = dist.group.WORLD if group is None else group
    return StepSequence(SequenceCut(length, group.size(), balance), CollectiveAxis(group))


def numbers(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return 2 * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(value: Any) -> Any:
    while isinstance(value, ShownTensor):
        value = value.detach().whole()
    return value


def compare(
    expression: Callable[..., Any], whole: Tensor, over: StepSequence, *, rtol: float = 1e-9, atol: float = 1e-9
) -> list[Any]:
    """The results on shown sequences (B, S, ...), after checking that they and the gradient are those on whole ones.

    Padding is NaN: nobody may ever see it.
    """
    leaf = whole.detach().clone().requires_grad_()
    local = over.part(whole, 1, float("nan")).clone().requires_grad_()
    shown = SequenceShard.wrap(local, dim=1, sequence=over)
    wanted, got = (tree_leaves(expression(x)) for x in (leaf * 1, shown * 1))
    assert len(wanted) == len(got)
    for one, other in zip(wanted, got, strict=True):
        if not isinstance(one, Tensor):
            assert one == other
            continue
        assert one.dtype == other.dtype, (one.dtype, other.dtype)
        assert one.shape == other.shape, (one.shape, other.shape)
        assert one.requires_grad == other.requires_grad
        torch.testing.assert_close(plain(other), one.detach(), rtol=rtol, atol=atol, equal_nan=True)
    pairs = [(a, b) for a, b in zip(wanted, got, strict=True) if isinstance(a, Tensor) and a.requires_grad]
    if not pairs:
        return got
    weights = [numbers(*a.shape, dtype=a.dtype, seed=1) for a, _ in pairs]
    (gradient,) = torch.autograd.grad(sum((a * w).sum() for (a, _), w in zip(pairs, weights, strict=True)), leaf)
    (local_gradient,) = torch.autograd.grad(sum((b * w).sum() for (_, b), w in zip(pairs, weights, strict=True)), local)
    assert type(local_gradient) is Tensor
    if not gradient.isnan().any():
        expected = over.part(gradient, 1) * over.cut.size
        torch.testing.assert_close(local_gradient, expected, rtol=rtol, atol=atol)
    return got

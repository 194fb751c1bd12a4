"""Runs the same expression on whole logits and on those that ranks hold the columns of."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_5d.tensor_parallel.axis import CollectiveAxis
from lightning_5d.tensor_parallel.vocabulary import VocabularyShard


def axis() -> CollectiveAxis:
    return CollectiveAxis(dist.group.WORLD)


def columns(whole: Tensor, over: CollectiveAxis) -> Tensor:
    """This rank's columns, padding being NaN: nobody may ever see it."""
    vocabulary = whole.shape[-1]
    width = -(-vocabulary // over.size)
    padding = whole.new_full((*whole.shape[:-1], over.size * width - vocabulary), float("nan"))
    return torch.cat([whole.detach(), padding], -1)[..., over.rank * width :][..., :width].clone()


def logits(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return 2 * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(value: Any) -> Any:
    return value.detach().whole() if isinstance(value, VocabularyShard) else value


def compare(
    expression: Callable[..., Any], whole: Tensor, over: CollectiveAxis, *, rtol: float = 1e-9, atol: float = 1e-9
) -> list[Any]:
    """The results on a shard, after checking that they and the gradient are those on whole logits."""
    leaf = whole.detach().clone().requires_grad_()
    local = columns(whole, over).requires_grad_()
    shard = VocabularyShard.wrap(local, vocabulary=whole.shape[-1], axis=over)
    wanted, got = (tree_leaves(expression(x)) for x in (leaf * 1, shard * 1))
    assert len(wanted) == len(got)
    for one, other in zip(wanted, got, strict=True):
        if not isinstance(one, Tensor):
            assert one == other
            continue
        assert one.dtype == other.dtype, (one.dtype, other.dtype)
        assert one.shape == other.shape, (one.shape, other.shape)
        assert one.requires_grad == other.requires_grad
        torch.testing.assert_close(plain(other), one.detach(), rtol=rtol, atol=atol, equal_nan=True)
    with_graph = [
        (one, other) for one, other in zip(wanted, got, strict=True) if isinstance(one, Tensor) and one.requires_grad
    ]
    if not with_graph:
        return got
    weights = [logits(*one.shape, dtype=one.dtype, seed=1) for one, _ in with_graph]
    (gradient,) = torch.autograd.grad(
        sum((one * w).sum() for (one, _), w in zip(with_graph, weights, strict=True)), leaf
    )
    (local_gradient,) = torch.autograd.grad(
        sum((other * w).sum() for (_, other), w in zip(with_graph, weights, strict=True)), local
    )
    assert type(local_gradient) is Tensor
    expected = columns(gradient, over).nan_to_num(nan=0.0) if not gradient.isnan().any() else None
    if expected is not None:
        torch.testing.assert_close(local_gradient, expected, rtol=rtol, atol=atol)
    return got

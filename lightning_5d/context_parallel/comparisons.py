"""Comparisons of a number per token with itself: where masks of pairs of tokens begin."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_5d.context_parallel.inside import Inside
from lightning_5d.context_parallel.pairs import Condition, Distances, PairMask, Pairs, as_mask, bounds
from lightning_5d.context_parallel.triangle import Triangle

_KINDS: dict[Any, str] = {
    function: kind
    for kind in ("eq", "ne", "ge", "gt", "le", "lt", "sub")
    for function in (getattr(torch, kind), getattr(Tensor, kind), getattr(Tensor, f"__{kind}__"))
}
_BOTH = frozenset([torch.logical_and, Tensor.logical_and, torch.bitwise_and, Tensor.bitwise_and, Tensor.__and__])
COMPARISONS = frozenset([*_KINDS, *_BOTH])
"""What may make a mask of pairs of tokens."""


def compared(
    inside: Inside,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    watch: Callable[[Tensor], None] | None = None,
) -> Tensor | None:
    """The mask, or the distances, that an operation makes of pairs of tokens; ``None`` if it makes something else.

    Args:
        inside: The door that is open.
        func: One of `COMPARISONS`.
        args: Its arguments.
        kwargs: Those by name.
        watch: Is shown the numbers, before anything is made of them.
    """
    if kwargs or len(args) != 2 or not isinstance(args[0], Tensor) or not isinstance(args[1], Tensor):
        return None
    one, other = args
    if func in _BOTH:
        for mine, its in ((one, other), (other, one)):
            if isinstance(mine, Triangle) and not isinstance(its, Pairs):
                mask = as_mask(inside, mine)
                return None if mask is None else mask.follow("__and__", func, (mask, its), {})
    size = inside.sequence.cut.local
    found = _outer(one, other, size)
    if found is None:
        return None
    if watch is not None:
        watch(one)
    tokens, lead, sign = found
    kind = "and" if func in _BOTH else _KINDS[func]
    rows = torch.arange(math.prod(lead)).reshape(lead)
    numbers = tokens.reshape(-1, size)
    shape = (*lead, size, size)
    device = tokens.device
    if kind in ("eq", "ne"):
        condition = Condition("document", rows, numbers)
        return PairMask.of(inside, [condition], torch.tensor([kind == "eq", kind == "ne"]), shape, device)
    if kind == "and":
        if tokens.dtype != torch.bool:
            return None
        conditions = [Condition("key", rows, numbers), Condition("document", rows, numbers)]
        return PairMask.of(inside, conditions, torch.tensor([True, False]), shape, device)
    if tokens.is_floating_point() or tokens.dtype == torch.bool:
        return None
    if kind == "sub":
        return Distances.of(inside, Condition("distance", rows, numbers), sign, shape)
    low, high = bounds(kind, 0, sign)
    condition = Condition("distance", rows, numbers, low, high)
    return PairMask.of(inside, [condition], torch.tensor([True, False]), shape, device)


def _outer(one: Tensor, other: Tensor, size: int) -> tuple[Tensor, tuple[int, ...], int] | None:
    """Numbers per token (..., s), of which two views are queries and keys; the dimensions before; 1 if queries come first, else -1."""
    if size < 2 or type(one) not in _PLAIN or type(other) not in _PLAIN or one.requires_grad or other.requires_grad:
        return None
    for query, key, sign in ((one, other, 1), (other, one, -1)):
        if query.ndim < 2 or query.shape[-2:] != (size, 1) or not key.ndim or key.shape[-1] != size:
            continue
        if key.ndim > 1 and key.shape[-2] != 1:
            continue
        tokens, keys = query[..., 0], key if key.ndim == 1 else key[..., 0, :]
        if _is_same(tokens, keys):
            return tokens, tuple(tokens.shape[:-1]), sign
    return None


_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.dtype == other.dtype and _places(one) == _places(other)


def _places(x: Tensor) -> list[tuple[int, int]]:
    """Sizes and strides of dimensions that are more than one."""
    return [(length, stride) for length, stride in zip(x.shape, x.stride(), strict=True) if length > 1]

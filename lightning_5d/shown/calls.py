"""What people call by name: sampling, assignment to parts of a tensor, and ways out of PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_5d.shown.made_whole import tell
from lightning_5d.shown.registry import EVERY
from lightning_5d.shown.tensor import ShownTensor


@EVERY.answers(torch.multinomial, Tensor.multinomial)
def _multinomial(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard = args[0] if args else kwargs.get("input")
    if not isinstance(shard, ShownTensor):
        return NotImplemented
    tell("multinomial", shard)
    drawn = func(*tree_map(_gathered, args), **tree_map(_gathered, kwargs))
    # The first rank's sample, so that all go on with the same one whatever their generators did before.
    return shard.summed(drawn if shard.axis.rank == 0 else torch.zeros_like(drawn))


@EVERY.answers(Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__)
def _out_of_torch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tell(func.__name__, args[0])
    # Of what is no leaf of a graph, torch refuses to give numbers that are not detached.
    whole = _gathered(args[0]) if func is Tensor.tolist else args[0].whole()
    return func(whole, *args[1:], **kwargs)


def _gathered(value: Any) -> Any:
    return _gathered(value.gathered()) if isinstance(value, ShownTensor) else value


def _gathered_inside(index: Any) -> Any:
    return tuple(map(_gathered, index)) if isinstance(index, tuple) else _gathered(index)


@EVERY.answers(Tensor.__setitem__)
def _assign(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x[index] = number``: where the index points to becomes a mask."""
    x, index, value = args
    if not isinstance(x, ShownTensor):
        if isinstance(value, ShownTensor):
            tell("assignment to a whole tensor", value)
            value = value.whole()
        x[_gathered_inside(index)] = value
        return None
    if isinstance(value, Tensor) and value.numel() != 1:
        raise NotImplementedError(
            f"Assigning {tuple(value.shape)} values to a part of something that {x.axis.size} ranks hold together ({x.made_whole.format(x.axis.size)} otherwise) is not supported."
            " Use torch.where with a whole tensor, or .whole() first."
        )
    index = _gathered_inside(index)
    parts = list(index) if isinstance(index, tuple) else [index]
    mask = torch.zeros(_mask_shape(x, parts), dtype=torch.bool, device=x.device)
    mask[index] = True
    x.masked_fill_(mask, value)
    return None


def _mask_shape(x: ShownTensor, index: list[Any]) -> list[int]:
    """The shape of a tensor, with size 1 for dimensions that all of are meant."""

    def consumes(part: Any) -> int:
        if part is None or part is Ellipsis or isinstance(part, bool):
            return 0
        return part.ndim if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) else 1

    missing = x.ndim - sum(map(consumes, index))
    shape, dim = list(x.shape), 0
    if not any(part is Ellipsis for part in index):
        index = [*index, Ellipsis]
    for part in index:
        free = missing if part is Ellipsis else consumes(part)
        if part is Ellipsis or (isinstance(part, slice) and part == slice(None)):
            shape[dim : dim + free] = [1] * free
        dim += free
    return shape


@EVERY.answers(Tensor.__deepcopy__)
def _deepcopy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard, memo = args
    if not isinstance(shard, ShownTensor) or shard.requires_grad:
        return NotImplemented
    memo[id(shard)] = copied = shard.like(copy.deepcopy(shard.local, memo))
    return copied

"""What people call on logits by name: losses, sampling, assignment to parts of them, and ways out of PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction as legacy
from torch.utils._pytree import tree_map

from lightning_5d.tensor_parallel.vocabulary.choices import pick
from lightning_5d.tensor_parallel.vocabulary.cross_entropy import cross_entropy
from lightning_5d.tensor_parallel.vocabulary.made_whole import tell
from lightning_5d.tensor_parallel.vocabulary.registry import answers
from lightning_5d.tensor_parallel.vocabulary.shard import VocabularyShard


def _reduction(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    if size_average is None and reduce is None:
        return reduction
    return legacy.legacy_get_string(size_average, reduce)


@answers(F.cross_entropy)
def _cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(
        input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None, ignore_index: int = -100,
        reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
    ) -> Any:  # fmt: skip
        if not isinstance(input, VocabularyShard):
            return NotImplemented
        return cross_entropy(
            input,
            target,
            weight=weight,
            ignore_index=ignore_index,
            reduction=_reduction(size_average, reduce, reduction),
            label_smoothing=label_smoothing,
        )

    return call(*args, **kwargs)


@answers(F.nll_loss)
def _nll_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(
        input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None, ignore_index: int = -100,
        reduce: bool | None = None, reduction: str = "mean",
    ) -> Any:  # fmt: skip
        class_dim = 0 if input.ndim == 1 else 1
        sizes = [size for d, size in enumerate(input.shape) if d != class_dim]
        if not isinstance(input, VocabularyShard) or input.vocabulary_dim != class_dim or list(target.shape) != sizes:
            return NotImplemented
        how = _reduction(size_average, reduce, reduction)
        ignored = target == ignore_index
        safe = target.masked_fill(ignored, 0)
        picked = pick(input, safe.unsqueeze(class_dim)).squeeze(class_dim)
        factor = (torch.ones_like(picked) if weight is None else weight.to(picked.dtype)[safe]).masked_fill(ignored, 0)
        loss = -(picked * factor).masked_fill(ignored, 0)
        return loss if how == "none" else loss.sum() / (factor.sum() if how == "mean" else 1)

    return call(*args, **kwargs)


@answers(torch.multinomial, Tensor.multinomial)
def _multinomial(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard = args[0] if args else kwargs.get("input")
    if not isinstance(shard, VocabularyShard):
        return NotImplemented
    tell("multinomial", shard)
    drawn = func(*tree_map(_detached_whole, args), **tree_map(_detached_whole, kwargs))
    # The first rank's sample, so that all go on with the same one whatever their generators did before.
    return shard.axis.sum(drawn if shard.axis.rank == 0 else torch.zeros_like(drawn))


@answers(Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__)
def _out_of_torch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tell(func.__name__, args[0])
    if func is Tensor.tolist:
        return args[0].gathered().tolist()
    return func(args[0].whole(), *args[1:], **kwargs)


def _detached_whole(value: Any) -> Any:
    return value.gathered() if isinstance(value, VocabularyShard) else value


@answers(Tensor.__setitem__)
def _assign(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``logits[index] = number``: where the index points to becomes a mask."""
    logits, index, value = args
    if not isinstance(logits, VocabularyShard):
        logits[index] = value.whole() if isinstance(value, VocabularyShard) else value
        return None
    if isinstance(value, Tensor) and value.numel() != 1:
        raise NotImplementedError(
            f"Assigning {tuple(value.shape)} values to a part of logits that {logits.axis.size} ranks hold the columns of is not"
            " supported. Use torch.where with a whole tensor, or logits.whole() first."
        )
    parts = list(index) if isinstance(index, tuple) else [index]
    mask = torch.zeros(_mask_shape(logits, parts), dtype=torch.bool, device=logits.device)
    mask[index] = True
    logits.masked_fill_(mask, value)
    return None


def _mask_shape(logits: VocabularyShard, index: list[Any]) -> list[int]:
    """The shape of logits, with size 1 for dimensions that all of are meant."""

    def consumes(part: Any) -> int:
        if part is None or part is Ellipsis or isinstance(part, bool):
            return 0
        return part.ndim if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) else 1

    missing = logits.ndim - sum(map(consumes, index))
    shape, dim = list(logits.shape), 0
    if not any(part is Ellipsis for part in index):
        index = [*index, Ellipsis]
    for part in index:
        free = missing if part is Ellipsis else consumes(part)
        if part is Ellipsis or (isinstance(part, slice) and part == slice(None)):
            shape[dim : dim + free] = [1] * free
        dim += free
    return shape


@answers(Tensor.__deepcopy__)
def _deepcopy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard, memo = args
    if not isinstance(shard, VocabularyShard) or shard.requires_grad:
        return NotImplemented
    memo[id(shard)] = copied = shard.like(copy.deepcopy(shard.local, memo))
    return copied

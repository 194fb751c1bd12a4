"""Finding columns by value, and values by column: argmax, topk, max, gather, indexing."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from lightning_5d.tensor_parallel.vocabulary.registry import answers, by_name, handles
from lightning_5d.tensor_parallel.vocabulary.shard import VocabularyShard

aten = torch.ops.aten

_EXACT_IN_FLOAT32 = 2**24


def _gather_candidates(shard: VocabularyShard, values: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Values and their columns in the whole logits, of all ranks one after the other along the vocabulary; one collective."""
    narrow = shard.vocabulary <= _EXACT_IN_FLOAT32 and shard.dtype != torch.float64
    both = torch.stack([values, index + shard.start]).to(torch.float32 if narrow else torch.float64)
    values, columns = shard.axis.gather(both, shard.vocabulary_dim + 1)
    return values.to(shard.dtype), columns.long()


def top(shard: VocabularyShard, count: int, *, largest: bool = True, in_order: bool = True) -> tuple[Tensor, Tensor]:
    """The largest (or smallest) values along the vocabulary and their columns, without a graph.

    Raises:
        RuntimeError: If there are not so many columns.
    """
    if not 0 <= count <= shard.vocabulary:
        raise RuntimeError("selected index k out of range")  # as torch says it
    dim, most = shard.vocabulary_dim, min(count, shard.width)
    values, index = shard.columns.detach().topk(min(count, shard.held), dim, largest, in_order)
    missing = most - values.shape[dim]
    if missing:
        shape = [missing if d == dim else size for d, size in enumerate(values.shape)]
        values, index = (torch.cat([part, part.new_zeros(shape)], dim) for part in (values, index))
    values, columns = _gather_candidates(shard, values, index)
    ranks = range(shard.axis.size)
    real = [rank * most + place for rank in ranks for place in range(min(most, shard.held_by(rank)))]
    if len(real) < shard.axis.size * most:
        values, columns = (part.index_select(dim, torch.tensor(real, device=part.device)) for part in (values, columns))
    values, chosen = values.topk(count, dim, largest, in_order)
    return values, columns.gather(dim, chosen)


def best(shard: VocabularyShard, *, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The largest (or smallest) value along the vocabulary, and the first column that has it, without a graph.

    The dimension stays, with size 1.
    """
    dim, columns = shard.vocabulary_dim, shard.columns.detach()
    if shard.held:
        values, index = columns.max(dim, keepdim=True) if largest else columns.min(dim, keepdim=True)
    else:
        values = torch.full_like(shard.local.narrow(dim, 0, 1), -torch.inf if largest else torch.inf)
        index = torch.zeros_like(values, dtype=torch.int64)
    values, found = _gather_candidates(shard, values, index)
    values, rank = values.max(dim, keepdim=True) if largest else values.min(dim, keepdim=True)
    return values, found.gather(dim, rank)


class _Pick(torch.autograd.Function):
    """Values at given columns; backward: the gradient at those columns, by the rank that holds them."""

    @staticmethod
    @override
    def forward(ctx: Any, shard: VocabularyShard, index: Tensor) -> Tensor:
        own, absent = shard.owned(index)
        ctx.save_for_backward(own, absent)
        ctx.like, ctx.shape, ctx.dim = shard.like, shard.local.shape, shard.vocabulary_dim
        return shard.axis.sum(_number(shard.local.gather(shard.vocabulary_dim, own)).masked_fill_(absent, 0)).to(
            shard.dtype
        )

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[VocabularyShard, None]:
        own, absent = ctx.saved_tensors
        zeros = grad.new_zeros(ctx.shape)
        return ctx.like(zeros.scatter_add_(ctx.dim, own, grad.masked_fill(absent, 0))), None


def _number(values: Tensor) -> Tensor:
    return values.to(torch.uint8) if values.dtype is torch.bool else values


def pick(shard: VocabularyShard, index: Tensor) -> Tensor:
    """`torch.gather` along the vocabulary: one sum over ranks of the size of `index`, and a gradient that stays in columns.

    Raises:
        RuntimeError: If a column is not there; on an accelerator that is an assertion on the device, as torch has it.
    """
    _refuse_strangers((index < 0) | (index >= shard.vocabulary), index, shard, RuntimeError)
    if index.ndim != shard.ndim:
        raise RuntimeError("Index tensor must have the same number of dimensions as input tensor")
    return cast(Tensor, _Pick.apply(shard, index))  # type: ignore[no-untyped-call]


def _refuse_strangers(strangers: Tensor, index: Tensor, shard: VocabularyShard, error: type[Exception]) -> None:
    if index.device.type != "cpu":
        torch._assert_async(~strangers.any(), "column index out of bounds")  # private; checked with torch 2.13
    elif strangers.any():
        stranger = int(index[strangers][0])
        raise error(
            f"index {stranger} is out of bounds for dimension {shard.vocabulary_dim} with size {shard.vocabulary}"
        )


def _floating(shard: VocabularyShard) -> bool:
    return isinstance(shard, VocabularyShard) and shard.dtype.is_floating_point


def _along(shard: VocabularyShard, dim: Any) -> bool:
    return isinstance(dim, int) and dim % shard.ndim == shard.vocabulary_dim


@answers(torch.gather, torch.Tensor.gather)
def _gather(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(
        input: Any = None, dim: Any = None, index: Any = None, *, sparse_grad: bool = False, out: Any = None
    ) -> Any:
        if not isinstance(input, VocabularyShard) or isinstance(index, VocabularyShard) or out is not None:
            return NotImplemented
        return pick(input, index) if _along(input, dim) else NotImplemented

    return call(*args, **kwargs)


@handles(aten.gather.default)
def _gather_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard, dim, index = args
    if not isinstance(shard, VocabularyShard) or isinstance(index, VocabularyShard) or not _along(shard, dim):
        return NotImplemented
    return pick(shard, index)


@answers(torch.topk, torch.Tensor.topk)
def _topk(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(input: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *, out: Any = None) -> Any:
        if not _floating(input) or not _along(input, dim) or out is not None:
            return NotImplemented
        values, index = top(input, k, largest=largest, in_order=sorted)
        return torch.return_types.topk((_with_graph(input, values, index), index))

    return call(*args, **kwargs)


@answers(torch.max, torch.Tensor.max, torch.min, torch.Tensor.min)
def _max(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    largest = func in (torch.max, torch.Tensor.max)

    def call(input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None, out: Any = None) -> Any:
        if not _floating(input) or not _along(input, dim) or out is not None:
            return NotImplemented
        values, index = best(input, largest=largest)
        values = _with_graph(input, values, index)
        values, index = (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))
        kind = torch.return_types.max if largest else torch.return_types.min
        return kind((values, index))

    return call(*args, **kwargs)


def _with_graph(shard: VocabularyShard, values: Tensor, index: Tensor) -> Tensor:
    return pick(shard, index) if torch.is_grad_enabled() and shard.requires_grad else values


@handles(aten.argmax.default, aten.argmin.default)
def _argmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
        if not _floating(input):
            return NotImplemented
        if dim is not None and not _along(input, dim):
            return input.like(
                func(input.local, dim, keepdim),
                input.vocabulary_dim - (not keepdim and dim % input.ndim < input.vocabulary_dim),
            )
        if dim is None and input.ndim > 1:
            return NotImplemented
        _, index = best(input, largest=func is aten.argmax.default)
        return index if keepdim else index.squeeze(input.vocabulary_dim)

    return call(*args, **kwargs)


@handles(aten.topk.default)
def _topk_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = by_name(func, args, kwargs)
    shard, count, dim, largest, in_order = (given[name] for name in ("self", "k", "dim", "largest", "sorted"))
    return (
        top(shard, count, largest=largest, in_order=in_order)
        if _along(shard, dim) and _floating(shard)
        else NotImplemented
    )


@handles(aten.max.dim, aten.min.dim)
def _max_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = by_name(func, args, kwargs)
    shard, dim, keepdim = given["self"], given["dim"], given["keepdim"]
    if not _along(shard, dim) or not _floating(shard):
        return NotImplemented
    values, index = best(shard, largest=func is aten.max.dim)
    return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))


@handles(aten.index.Tensor)
def _index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard, given = args
    if not isinstance(shard, VocabularyShard) or any(isinstance(one, VocabularyShard) for one in given):
        return NotImplemented
    indices = _integers(given)
    indices += [None] * (shard.ndim - len(indices))
    used = [d for d, index in enumerate(indices) if index is not None]
    block = torch.broadcast_tensors(*(one for one in indices if one is not None))[0].shape  # type: ignore[no-untyped-call]
    # Indices next to each other are replaced by their common shape, others move to the front.
    front = used[0] if used[-1] - used[0] == len(used) - 1 else 0
    columns = indices[shard.vocabulary_dim]
    if columns is None:
        kept = sum(d not in used for d in range(shard.vocabulary_dim))
        return shard.like(func(shard.local, indices), kept + (len(block) if front <= kept else 0))
    _refuse_strangers((columns < -shard.vocabulary) | (columns >= shard.vocabulary), columns, shard, IndexError)
    own, absent = shard.owned(columns % shard.vocabulary)
    indices[shard.vocabulary_dim] = own
    picked = _number(func(shard.local, indices))
    mask = absent.expand(block).reshape(*block, *[1] * (picked.ndim - front - len(block)))
    return shard.axis.sum(picked.masked_fill(mask, 0)).to(shard.dtype)


@handles(aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default, aten._unsafe_index_put.default)
def _index_put(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Puts rows of logits into logits: the gradient of taking some out."""
    shard, given, values, *rest = args
    if not isinstance(shard, VocabularyShard) or not isinstance(values, VocabularyShard):
        return NotImplemented
    indices = _integers(given)
    if values.ndim - values.vocabulary_dim != shard.ndim - shard.vocabulary_dim:
        return NotImplemented
    if len(indices) > shard.vocabulary_dim and indices[shard.vocabulary_dim] is not None:
        return NotImplemented
    result = func(shard.local, indices, values.local, *rest, **kwargs)
    return shard if func._schema.is_mutable else shard.like(result)


def _integers(given: Any) -> list[Tensor | None]:
    """Indices with masks replaced by the places where they are true."""
    indices: list[Tensor | None] = []
    for index in given:
        indices += (
            index.nonzero().unbind(1) if index is not None and index.dtype in (torch.bool, torch.uint8) else [index]
        )
    return indices

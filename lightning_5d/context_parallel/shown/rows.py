"""Single tokens and chosen ones: ``x[:, 0]``, ``x[mask]``, ``x[rows, last]``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_5d.context_parallel.shown.placement import Placement, padded
from lightning_5d.context_parallel.shown.registry import answers, handles
from lightning_5d.context_parallel.shown.shard import SequenceShard, held, show
from lightning_5d.context_parallel.shown.tokens import Selection
from lightning_5d.context_parallel.shown.totals import total

aten = torch.ops.aten

_MASKS = (torch.bool, torch.uint8)
_EVERYTHING = slice(None)


def located(placement: Placement, index: Tensor) -> tuple[Tensor, Tensor]:
    """Which rank holds entries of a placement's dimension, and where it has them (a number that means nothing for others)."""
    tokens, device = placement.tokens, index.device
    token = index // placement.trail % tokens.size if placement.merged else index
    owner, place = tokens.owner(device)[token], tokens.place(device)[token]
    if placement.merged:
        lead, trail = index // (placement.trail * tokens.size), index % placement.trail
        place = (lead * tokens.counts[placement.rank] + place) * placement.trail + trail
    return owner, place


def one_token(shard: SequenceShard, index: int) -> Tensor:
    """``x.select(dim, index)`` along the tokens: plain, from the rank that holds it; one sum of its size."""
    size, dim = shard.placement.size, shard.cut_dim
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of bounds for dimension {dim} with size {size}")  # as torch says it
    owner, place = located(shard.placement, torch.tensor(index % size))
    mine = int(owner) == shard.placement.rank
    # Of nothing, too, there is a sum, and a graph: all ranks run the same program.
    kept = held(shard).narrow(dim, int(place) if mine else 0, int(mine)).sum(dim)
    return total(kept, shard.axis).to(shard.dtype)


def chosen(shard: SequenceShard, given: list[Tensor | None]) -> Tensor:
    """``x[indices]`` with an index along the tokens.

    Tokens that a mask has chosen stay where they are. Those with given numbers become a plain tensor, by one sum of its size.

    Args:
        shard: The tensor.
        given: An index or a mask, plain, for dimensions from the first on; ``None`` for those of which all is taken.
    """
    indices: list[Tensor | None] = []
    masked = False
    for index in given:
        if index is not None and index.dtype in _MASKS:
            start = len(indices)
            indices += index.nonzero().unbind(1)
            masked = masked or start <= shard.cut_dim < len(indices)
        else:
            indices.append(index)
    indices += [None] * (shard.ndim - len(indices))
    along = indices[shard.cut_dim]
    if along is None:
        raise ValueError("No index goes along the tokens.")
    size = shard.placement.size
    strangers = (along < -size) | (along >= size)
    if along.device.type == "cpu" and strangers.any():
        raise IndexError(
            f"index {int(along[strangers][0])} is out of bounds for dimension {shard.cut_dim} with size {size}"
        )
    owner, place = located(shard.placement, along % size if size else along)
    used = [index for index in indices if index is not None]
    if masked and all(index.ndim == 1 and index.shape == along.shape for index in used):
        return _masked(shard, indices, owner, place)
    mine = owner == shard.placement.rank
    indices[shard.cut_dim] = place.masked_fill(~mine, 0)
    local = held(shard)
    if not local.shape[shard.cut_dim]:
        local = padded(local, shard.cut_dim, 1)
    block = torch.broadcast_tensors(*used)[0].shape  # type: ignore[no-untyped-call]
    picked = local[tuple(_EVERYTHING if index is None else index for index in indices)]
    front = _front(indices)
    absent = (~mine).expand(block).reshape(*block, *[1] * (picked.ndim - front - len(block)))
    picked = picked.to(torch.uint8) if picked.dtype is torch.bool else picked
    return total(picked.masked_fill(absent, 0), shard.axis).to(shard.dtype)


def _masked(shard: SequenceShard, indices: list[Tensor | None], owner: Tensor, place: Tensor) -> SequenceShard:
    here = (owner == shard.placement.rank).nonzero()[:, 0]
    own = [index if index is None else index[here] for index in indices]
    own[shard.cut_dim] = place[here]
    local = held(shard)[tuple(_EVERYTHING if index is None else index for index in own)]
    tokens = Selection(owner, shard.axis.size)
    return show(local, Placement(shard.placement.sequence, tokens, _front(indices)))


def _front(indices: list[Tensor | None]) -> int:
    """Where the result of indexing has the dimensions of the indices."""
    used = [d for d, index in enumerate(indices) if index is not None]
    return used[0] if used[-1] - used[0] == len(used) - 1 else 0


@answers(torch.select, Tensor.select)
def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(input: Any, dim: int, index: int) -> Any:
        along = isinstance(input, SequenceShard) and isinstance(dim, int) and dim % input.ndim == input.cut_dim
        return one_token(input, int(index)) if along else NotImplemented

    return call(*args, **kwargs)


@answers(Tensor.__getitem__)
def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard, given = args
    if not isinstance(shard, SequenceShard):
        return NotImplemented
    items = _items(given, shard.ndim)
    if items is None:
        return NotImplemented
    dim, position = 0, None
    for number, item in enumerate(items):
        width = _width(item)
        if dim <= shard.cut_dim < dim + width:
            position = number
        dim += width
    if position is None or isinstance(items[position], slice):
        return NotImplemented
    if isinstance(items[position], int):
        return one_token(shard, items[position])[tuple(items[:position] + items[position + 1 :])]
    # As PyTorch does it: first all that is no tensor, then the tensors.
    basic: list[Any] = []
    advanced: list[Tensor | None] = []
    for item in items:
        if isinstance(item, Tensor):
            basic += [_EVERYTHING] * _width(item)
            advanced.append(item)
            continue
        basic.append(item)
        if not isinstance(item, int):
            advanced.append(None)
    if any(not (isinstance(item, slice) and item == _EVERYTHING) for item in basic):
        shard = shard[tuple(basic)]
    return chosen(shard, [index if index is None else _plain(index, shard) for index in advanced])


def _items(given: Any, ndim: int) -> list[Any] | None:
    """What an index has for each dimension, without an ellipsis; ``None`` for indices that are left to PyTorch."""
    items = []
    for item in given if isinstance(given, tuple) else (given,):
        if isinstance(item, list):
            item = torch.tensor(item)
        if isinstance(item, Tensor) and not item.ndim and item.dtype not in _MASKS:
            item = int(item)
        if isinstance(item, bool) or (isinstance(item, Tensor) and not item.ndim):
            return None
        if not (item is None or item is Ellipsis or isinstance(item, (int, slice, Tensor))):
            return None
        items.append(item)
    missing = ndim - sum(map(_width, items))
    if missing < 0:
        return None
    for number, item in enumerate(items):
        if item is Ellipsis:
            return items[:number] + [_EVERYTHING] * missing + items[number + 1 :]
    return items + [_EVERYTHING] * missing


def _width(item: Any) -> int:
    """Dimensions that an item of an index is about."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype in _MASKS else 1


def _plain(index: Tensor, shard: SequenceShard) -> Tensor:
    """A mask or numbers, whole: they are small beside what they choose of."""
    return (index.gathered() if isinstance(index, SequenceShard) else index).to(shard.device)


@answers(torch.masked_select, Tensor.masked_select)
def _masked_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(input: Any, mask: Any, *, out: Any = None) -> Any:
        if not isinstance(input, SequenceShard) or out is not None:
            return NotImplemented
        shape = torch.broadcast_shapes(input.shape, mask.shape)  # type: ignore[no-untyped-call]
        if shape != input.shape:
            return NotImplemented
        return input[mask.expand(shape)]

    return call(*args, **kwargs)


@handles(aten.index.Tensor)
def _index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard, given = args
    if not isinstance(shard, SequenceShard):
        return NotImplemented
    given = [index if index is None else _plain(index, shard) for index in given]
    indices = _numbers(given)
    indices += [None] * (shard.ndim - len(indices))
    if indices[shard.cut_dim] is not None:
        return chosen(shard, given)
    used = [d for d, index in enumerate(indices) if index is not None]
    block = torch.broadcast_tensors(*(one for one in indices if one is not None))[0].ndim  # type: ignore[no-untyped-call]
    kept = sum(d not in used for d in range(shard.cut_dim))
    return shard.like(func(shard.local, indices), kept + (block if _front(indices) <= kept else 0))


@handles(aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default, aten._unsafe_index_put.default)
def _index_put(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Puts tokens into sequences, all of those of some rows: the gradient of taking some out."""
    shard, given, values, *rest = args
    if not isinstance(shard, SequenceShard) or not isinstance(values, SequenceShard) or not shard.matches(values):
        return NotImplemented
    indices = _numbers([index if index is None else _plain(index, shard) for index in given])
    if len(indices) > shard.cut_dim and indices[shard.cut_dim] is not None:
        return NotImplemented
    result = func(shard.local, indices, values.local, *rest, **kwargs)
    return shard if func._schema.is_mutable else shard.like(result)


def _numbers(given: list[Tensor | None]) -> list[Tensor | None]:
    """Indices with masks replaced by the places where they are true."""
    indices: list[Tensor | None] = []
    for index in given:
        indices += index.nonzero().unbind(1) if index is not None and index.dtype in _MASKS else [index]
    return indices

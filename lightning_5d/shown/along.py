"""Operations along dimensions that are whole: each rank does them on its part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_5d.shown.registry import EVERY, by_name
from lightning_5d.shown.tensor import first_shown

aten = torch.ops.aten


@EVERY.handles(
    aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default,
    aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default, aten.flip.default, aten.index_select.default, aten.roll.default,
    aten.sort.default, aten.sort.stable, aten.topk.default, aten.kthvalue.default, aten.median.dim, aten.mode.default,
    aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default, aten.argsort.default, aten.argsort.stable,
    aten._softmax.default, aten._log_softmax.default, aten._softmax_backward_data.default, aten._log_softmax_backward_data.default,
    aten.logsumexp.default, aten.var.correction, aten.std.correction, aten.prod.dim_int, aten.nansum.default, aten.glu.default,
    aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_.src, aten.scatter_.value,
    aten.scatter_add_.default, aten.constant_pad_nd.default,
)  # fmt: skip
def along_others(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operations along dimensions of which the one that is cut is none; plain tensors beside them are cut where it is."""
    given = by_name(func, args, kwargs)
    shard = first_shown((args, kwargs))
    dims = _dims(given, shard.ndim)
    if not dims or shard.cut_dim in dims:
        return NotImplemented
    kind, place, size = type(shard), shard.cut_dim, shard.shape[shard.cut_dim]
    mutable = func._schema.is_mutable
    operands = [value for value in given.values() if isinstance(value, Tensor) and value.ndim == shard.ndim]
    if any(value.shape[place] != size or (isinstance(value, kind) and not shard.matches(value)) for value in operands):
        return NotImplemented
    if mutable and not isinstance(args[0], kind):
        return NotImplemented

    def local(value: Any) -> Any:
        if isinstance(value, kind):
            return value.local
        return shard.part(value, place) if isinstance(value, Tensor) and value.ndim == shard.ndim else value

    def shown(value: Any) -> Any:
        lost = sum(d < place for d in dims) if isinstance(value, Tensor) and value.ndim < shard.ndim else 0
        return shard.like(value, place - lost) if isinstance(value, Tensor) else value

    result = func(*map(local, args), **tree_map(local, kwargs))
    if mutable:
        torch.autograd.graph.increment_version(args[0].local)
        return args[0]
    return tree_map(shown, result)


def _dims(given: dict[str, Any], ndim: int) -> list[int]:
    """The dimensions that an operation goes along; none for one that goes through all of them."""
    if "pad" in given:
        return list(range(ndim - len(given["pad"]) // 2, ndim))
    asked = given["dims"] if "dims" in given else given["dim"]
    return [d % ndim for d in ([asked] if isinstance(asked, int) else asked or ())]

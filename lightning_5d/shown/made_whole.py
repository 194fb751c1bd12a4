"""What is not done on parts: the tensor is made whole for it, and it is said once."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_5d.shown.tensor import ShownTensor
from lightning_5d.tensor_parallel.axis import TensorAxis

_told: WeakKeyDictionary[TensorAxis, set[str]] = WeakKeyDictionary()


def tell(name: str, shown: ShownTensor, *, view: bool = False) -> None:
    """Says, once for each operation and axis, that tensors are made whole.

    Args:
        name: The operation's.
        shown: The tensor.
        view: The result would share memory with it, and now does not.
    """
    told = _told.setdefault(shown.axis, set())
    if name in told:
        return
    told.add(name)
    rank_zero_warn(
        f"`{name}` on {shown.made_whole.format(shown.axis.size)} for it, and every rank"
        f" gets {shown.numel() * shown.element_size():,} bytes, each time.{' The result is a copy: do not change it in place.' * view}"
        f" {shown.never_whole} are done without that."
    )


def run_whole(kind: type[ShownTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs one operation on whole tensors; what it writes to is written back to the parts."""
    written = _written(func, args, kwargs)
    # What is overwritten with random numbers need not be known. They are drawn as one process would draw them.
    drawn = torch.Tag.nondeterministic_seeded in func.tags and func._schema.name.endswith("_")
    view = not written and any(result.alias_info is not None for result in func._schema.returns)
    wholes: dict[int, Tensor] = {}
    shards: dict[int, ShownTensor] = {}

    def whole(value: Any) -> Any:
        if not isinstance(value, kind):
            return value
        if id(value) not in wholes:
            shards[id(value)] = value
            if drawn and any(value is other for other in written):
                wholes[id(value)] = value.held_part.new_empty(value.shape)
            else:
                tell(func._overloadpacket.__name__, value, view=view)
                wholes[id(value)] = value.gathered()
        return wholes[id(value)]

    result = func(*tree_map(whole, args), **tree_map(whole, kwargs))
    for shard in written:
        if isinstance(shard, kind):
            if wholes[id(shard)].shape != shard.shape:
                raise NotImplementedError(
                    f"{func} would change the shape of a tensor in place that several ranks hold parts of."
                )
            shard.local.copy_(shard.part(wholes[id(shard)], shard.cut_dim))
            torch.autograd.graph.increment_version(shard.local)
    back = {id(wholes[key]): shard for key, shard in shards.items()}
    return tree_map(lambda value: back.get(id(value), value), result)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    written: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    return written

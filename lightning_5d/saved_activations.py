"""What a module saves for backward, and which operations made it: measured by running the module once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import SAC_IGNORED_OPS
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from lightning_5d.saved_operations import draws


@dataclass(frozen=True)
class Operation:
    """One call of an operation in a module's forward.

    Attributes:
        key: The operation's name and how many calls of it came before.
        size: Bytes of what it returns.
        work: Floating-point operations; elements read and written where no formula is known.
        position: Its place among all operations of the forward.
    """

    key: tuple[str, int]
    size: int
    work: float
    position: int


@dataclass(frozen=True)
class Measured:
    """What one module saves for backward.

    Attributes:
        saved: Bytes saved without checkpointing, parameters, buffers and inputs without gradient left out.
        inputs: Bytes of the inputs among them, which checkpointing keeps.
        operations: Those that could be kept, in their order.
    """

    saved: int
    inputs: int
    operations: tuple[Operation, ...]


Agree = Callable[[Measured], Measured]
"""Gives the same measurement on all ranks that have to decide alike."""


def first_of(groups: Sequence[dist.ProcessGroup], measured: Measured) -> Measured:
    """What the first rank of each group has measured; all of them call it together."""
    for group in groups:
        said = [measured]
        dist.broadcast_object_list(said, group=group, group_src=0)
        measured = said[0]
    return measured


def measure(run: Callable[[], Any], inputs: Sequence[Tensor], module: nn.Module) -> Measured:
    """Runs a module once under gradients and looks at what it saves.

    Args:
        run: Runs it.
        inputs: The tensors it runs on.
        module: The module, whose parameters and buffers do not count.
    """
    # An input without gradient (a mask, rotary angles) is one tensor for all blocks, and its maker's.
    foreign = {_storage(t) for t in (*module.parameters(), *module.buffers())}
    foreign |= {_storage(t) for t in inputs if not t.requires_grad}
    meter = Meter()
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> None:
        # Nothing goes into the graph: it is not gone through, and an operation's own result in it would never be freed.
        meter.last_save = meter.total
        if _storage(tensor) not in foreign:
            saved[_storage(tensor)] = tensor.detach()

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda nothing: nothing), meter:
        output = run()
    del output
    kept = {_storage(t): t for t in inputs if t.requires_grad}
    sizes = {key: tensor.untyped_storage().nbytes() for key, tensor in {**saved, **kept}.items()}
    # What comes after the last tensor that backward needs is not run again.
    needed = [call for call in meter.calls.values() if call.position <= meter.last_save]
    return Measured(sum(sizes.values()), sum(sizes[key] for key in kept), tuple(needed))


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations that could be kept."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[tuple[str, int], Operation] = {}
        self.total = self.last_save = 0
        self._makers: dict[int, tuple[str, int]] = {}
        self._seen: Counter[Any] = Counter()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in SAC_IGNORED_OPS:
            return out
        key = (str(func), self._seen[func])
        self._seen[func] += 1
        self.total += 1
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        shared = {_storage(tensor) for tensor in given}
        new = {_storage(tensor): tensor for tensor in made if _storage(tensor) not in shared}
        if func._schema.is_mutable:
            for tensor in _written(func, args, kwargs):
                # Torch refuses to hand out a kept result that was written to.
                self.calls.pop(self._makers.pop(_storage(tensor), key), None)
        for key_made in new:
            self._makers.pop(key_made, None)  # memory of an earlier result, used again
        if not new or len(new) < len(made) or func._schema.is_mutable or draws(func, args, kwargs):
            return out
        count = flop_registry.get(func._overloadpacket)
        work = float(count(*args, **kwargs, out_val=out)) if count else 0.0
        moved = sum(tensor.numel() for tensor in (*given, *made))
        size = sum(tensor.untyped_storage().nbytes() for tensor in new.values())
        self.calls[key] = Operation(key, size, max(work, float(moved), 1.0), self.total)
        self._makers.update(dict.fromkeys(new, key))
        return out


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The arguments that an operation writes to."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

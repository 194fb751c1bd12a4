"""Operations whose results selective activation checkpointing keeps: their names, and the policy torch asks."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils.checkpoint import CheckpointPolicy

GROUPS: dict[str, tuple[str, ...]] = {
    "matmul": ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_mm", "aten._grouped_mm"),
    "attention": (
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "aten._flash_attention_forward",
        "aten._efficient_attention_forward",
    ),
    "convolution": ("aten.convolution",),
    "collectives": (
        "_c10d_functional.all_reduce",
        "_c10d_functional.all_gather_into_tensor",
        "_c10d_functional.reduce_scatter_tensor",
        "_c10d_functional.all_to_all_single",
        "_c10d_functional.broadcast",
    ),
}
"""Names for the operations that are worth keeping, whichever kernel a device has for them."""

DEFAULT = ("matmul", "attention", "collectives")


@dataclass(frozen=True)
class SavedOperations:
    """The policy of selective checkpointing: keep what these operations return, recompute everything else.

    An operation that draws random numbers is always recomputed: skipped in the recomputation, it would leave the generator
    where it was, and whatever draws after it would see other numbers than in the forward.

    Args:
        names: Names of `GROUPS`, or of operations such as ``"aten.mm"``, ``"aten.mm.default"`` or ``"mylib::my_op"``.
    """

    names: tuple[str, ...] = DEFAULT

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """What torch asks for each operation inside a checkpointed module."""
        kept = operation in operations(self.names) and not draws(operation, args, kwargs)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class ChosenOperations:
    """The policy that keeps single calls of operations. It counts, so each call of the module needs its own.

    Args:
        keys: Names of operations, each with the number of calls of it that came before.
    """

    def __init__(self, keys: frozenset[tuple[str, int]]) -> None:
        self._keys = keys
        self._seen: Counter[Any] = Counter()

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """What torch asks for each operation, in the first run only."""
        key = (str(operation), self._seen[operation])
        self._seen[operation] += 1
        kept = key in self._keys and not draws(operation, args, kwargs)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def draws(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of an operation draws random numbers; attention does only if it drops something out."""
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
        return False
    for position, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given)
    return True


def unknown(names: Iterable[str]) -> dict[str, str]:
    """Names that mean no operation, each with what was probably meant."""
    found = {}
    for name in names:
        if not (isinstance(name, str) and (name in GROUPS or _overloads(name))):
            close = difflib.get_close_matches(str(name), [*GROUPS, *(op for ops in GROUPS.values() for op in ops)], 1)
            found[str(name)] = close[0] if close else "matmul"
    return found


@cache
def operations(names: tuple[str, ...]) -> frozenset[Any]:
    """All overloads that the names stand for."""
    return frozenset(op for name in names for single in GROUPS.get(name, (name,)) for op in _overloads(single))


def _overloads(name: str) -> list[OpOverload]:
    parts = name.replace("::", ".").split(".")
    if len(parts) == 1:
        parts = ["aten", *parts]
    found: Any = torch.ops
    try:
        for part in parts:
            found = getattr(found, part)
    except (AttributeError, RuntimeError):
        return []
    if isinstance(found, OpOverload):
        return [found]
    if isinstance(found, OpOverloadPacket):
        return [getattr(found, overload) for overload in found.overloads()]  # type: ignore[no-untyped-call]
    return []

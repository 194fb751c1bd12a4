"""What modules before the blocks return, as shapes: later stages continue from that without having them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True)
class TensorOutline:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def hollow(self, device: torch.device, *, writable: bool = False) -> Tensor:
        """A tensor that looks like it: NaN everywhere, or zero where the dtype has no NaN.

        It takes no memory, and so nobody may write to it, unless it is to be `writable`.
        """
        value = float("nan") if self.dtype.is_floating_point or self.dtype.is_complex else 0
        if writable:
            return torch.full(self.shape, value, dtype=self.dtype, device=device)
        return torch.full((), value, dtype=self.dtype, device=device).expand(self.shape)


@dataclass
class Outline:
    """What modules returned in one run of the first stage, call by call.

    It can be sent to other ranks. Keep one for each signature of inputs: a run looks more closely at the first use of one.

    Attributes:
        calls: For each module, by name, what its calls returned: any structure, with a `TensorOutline` for each tensor.
        seen: The stages of this rank that have run with it.
        written: Names of modules whose results the code after them writes to.
    """

    calls: Mapping[str, tuple[Any, ...]]
    seen: set[int] = field(default_factory=set, compare=False)
    written: set[str] = field(default_factory=set, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {"calls": dict(self.calls)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.calls, self.seen, self.written = state["calls"], set(), set()


def outlined(value: Any) -> Any:
    """A structure with a `TensorOutline` in place of each tensor."""
    if isinstance(value, Tensor):  # as most are
        return TensorOutline(tuple(value.shape), value.dtype)
    return tree_map(
        lambda leaf: TensorOutline(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf, value
    )


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors of a structure."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def hollowed(value: Any, device: torch.device, *, writable: bool = False) -> Any:
    """A structure with a tensor without values in place of each `TensorOutline`, or of each tensor."""
    if isinstance(value, TensorOutline):
        return value.hollow(device, writable=writable)

    def hollow(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            leaf = TensorOutline(tuple(leaf.shape), leaf.dtype)
        return leaf.hollow(device, writable=writable) if isinstance(leaf, TensorOutline) else leaf

    return tree_map(hollow, value)

"""Key and value heads that a model repeats for its query heads, of which the single ones are enough to send."""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor


class RepeatedHeads:
    """Remembers what the last few tensors with repeated heads were made of."""

    CALLS: ClassVar[tuple[Any, ...]] = (
        Tensor.reshape,
        torch.reshape,
        torch.repeat_interleave,
        Tensor.repeat_interleave,
        Tensor.flatten,
    )
    """Operations to tell `note` about."""

    def __init__(self) -> None:
        # A layer repeats keys and values, and then attends.
        self._last: deque[tuple[ref[Tensor], Tensor]] = deque(maxlen=4)

    def clear(self) -> None:
        """Forgets them."""
        self._last.clear()

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        """Looks whether an operation has repeated heads: (B, K, s, D) to (B, K*n, s, D)."""
        if result.ndim != 4 or not args:
            return
        x = args[0]
        if x.ndim == 5:
            # `repeat_kv` as in Hugging Face and Llama: (B, K, 1, s, D) expanded to (B, K, n, s, D), and reshaped.
            batch, heads, times, tokens, size = x.shape
            if times > 1 and x.stride(2) == 0 and result.shape == (batch, heads * times, tokens, size):
                self._last.append((ref(result), x[:, :, 0]))
        elif (
            x.ndim == 4 and func in (torch.repeat_interleave, Tensor.repeat_interleave) and result.shape[1] > x.shape[1]
        ):
            repeats = kwargs.get("repeats", args[1] if len(args) > 1 else None)
            if isinstance(repeats, int) and (result.shape[0], *result.shape[2:]) == (x.shape[0], *x.shape[2:]):
                self._last.append((ref(result), x))

    def undone(self, heads: Tensor) -> Tensor:
        """The single heads of repeated ones; others as they are."""
        for repeated, single in self._last:
            if repeated() is heads:
                return single
        return heads

"""The causal triangle over a rank's own tokens, of which it is known how it was made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# What leaves the triangle one, with no tensor beside it.
_KEPT = frozenset(
    ["__getitem__", "alias", "bool", "clone", "contiguous", "detach", "expand", "float", "half", "bfloat16", "double", "int", "long",
     "to", "type", "unsqueeze", "view", "reshape"]
)  # fmt: skip
_INVERTED = frozenset(["__invert__", "logical_not", "bitwise_not"])


class Triangle(Tensor):
    """What `torch.tril` or `torch.triu` has made of one number, and views and copies of it.

    Anything else that is computed of it is a plain tensor.

    Attributes:
        lower: The value on the diagonal and below.
        upper: The value above.
        made_at: Its version then; nothing is known about one that has been written to.
    """

    lower: float
    upper: float
    made_at: int

    @classmethod
    def of(cls, tensor: Tensor, lower: float, upper: float) -> Triangle:
        """The same tensor, with what is known about it."""
        triangle = tensor.as_subclass(cls)
        triangle.lower, triangle.upper, triangle.made_at = lower, upper, tensor._version
        return triangle

    def says_causal(self, hides: bool) -> bool:
        """Whether it is a causal mask.

        Args:
            hides: Whether ``True`` hides a key.
        """
        if self._version != self.made_at:
            return False
        if self.dtype == torch.bool:
            return bool(self.lower) != hides and bool(self.upper) == hides
        return self.lower == 0 and self.upper <= -1e4

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes as with a plain tensor; follows the two values through what keeps the shape of a triangle."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if not isinstance(result, Tensor):
            return result
        name = getattr(func, "__name__", "")
        source = args[0] if args else None
        values = _values(name, source, args[1:], kwargs) if isinstance(source, Triangle) else None
        if values is None or result.shape[-2:] != source.shape[-2:]:
            return result.as_subclass(Tensor) if isinstance(result, Triangle) else result
        if result.dtype == torch.bool:
            values = (float(bool(values[0])), float(bool(values[1])))
        return cls.of(result, *values)


def _values(name: str, source: Triangle, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, float] | None:
    lower, upper = source.lower, source.upper
    if source._version != source.made_at:
        return None
    if name in _KEPT and not any(isinstance(x, Tensor) for x in (*rest, *kwargs.values())):
        return lower, upper
    if name in _INVERTED and source.dtype == torch.bool:
        return 1 - lower, 1 - upper
    if name in ("eq", "__eq__", "ne", "__ne__") and rest and isinstance(rest[0], int | float):
        is_equal = name.strip("_") == "eq"
        return float((lower == rest[0]) is is_equal), float((upper == rest[0]) is is_equal)
    if name == "masked_fill" and len(rest) == 2 and isinstance(rest[0], Triangle):
        if not isinstance(rest[1], int | float):
            return None
        where = rest[0]
        return float(rest[1]) if where.lower else lower, float(rest[1]) if where.upper else upper
    return None


def made(func: Callable[..., Any], x: Tensor, result: Tensor, diagonal: int) -> Tensor:
    """The result of `torch.tril` or `torch.triu`, with what is known about it where it is the causal triangle of one number.

    Args:
        func: Which of the two.
        x: What it was given.
        result: What it gave.
        diagonal: From which diagonal on.
    """
    is_lower = func in (torch.tril, Tensor.tril)
    if x.ndim != 2 or x.shape[0] != x.shape[1] or x.shape[0] < 2 or diagonal != (0 if is_lower else 1):
        return result
    if isinstance(x, Triangle) or x.requires_grad:
        return result
    low, high = x.aminmax() if x.dtype != torch.bool else (x.all(), x.any())
    if bool(low != high):
        return result
    value = float(low)
    return Triangle.of(result, *((value, 0.0) if is_lower else (0.0, value)))

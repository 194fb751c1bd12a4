"""The causal triangle over a rank's own tokens, of which it is known how it was made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# What leaves the triangle one, with no tensor beside it.
_KEPT = frozenset(
    ["__getitem__", "alias", "bool", "clone", "contiguous", "detach", "expand", "float", "half", "bfloat16", "double", "int", "long", "requires_grad_",
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
        if any(not issubclass(cls, kind) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            values = _values(name, args, kwargs)
            result = func(*args, **kwargs)
        if not isinstance(result, Tensor):
            return result
        if values is None or result.shape[-2:] != args[0].shape[-2:]:
            return result.as_subclass(Tensor) if isinstance(result, Triangle) else result
        if result.dtype == torch.bool:
            values = (float(bool(values[0])), float(bool(values[1])))
        return cls.of(result, *values)


def _values(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, float] | None:
    """The two values of what an operation makes of a triangle; ``None`` if that is none."""
    if name in ("masked_fill", "masked_fill_"):
        return _filled(*args) if len(args) == 3 else None
    source = args[0] if args else None
    if not isinstance(source, Triangle) or source._version != source.made_at:
        return None
    lower, upper = source.lower, source.upper
    if name in _KEPT and not any(isinstance(x, Tensor) for x in (*args[1:], *kwargs.values())):
        return lower, upper
    if name in _INVERTED and source.dtype == torch.bool:
        return 1 - lower, 1 - upper
    if name in ("eq", "__eq__", "ne", "__ne__") and len(args) == 2 and isinstance(args[1], int | float):
        is_equal = name.strip("_") == "eq"
        return float((lower == args[1]) is is_equal), float((upper == args[1]) is is_equal)
    return None


def _filled(x: Tensor, where: Any, value: Any) -> tuple[float, float] | None:
    if not isinstance(where, Triangle) or where._version != where.made_at or not isinstance(value, int | float):
        return None
    if isinstance(x, Triangle):
        lower, upper = (x.lower, x.upper) if x._version == x.made_at else (None, None)
    else:
        lower = upper = number_of(x) if x.shape[-2:] == where.shape[-2:] else None
    if lower is None or upper is None:
        return None
    return float(value) if where.lower else lower, float(value) if where.upper else upper


def number_of(x: Tensor) -> float | None:
    """The number that a tensor consists of; ``None`` if there are several."""
    if not x.numel():
        return None
    low, high = x.aminmax() if x.dtype != torch.bool else (x.all(), x.any())
    return float(low) if bool(low == high) else None


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
    value = number_of(x)
    if value is None:
        return result
    return Triangle.of(result, *((value, 0.0) if is_lower else (0.0, value)))

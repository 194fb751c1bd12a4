"""What a door returned that each rank made of its own tokens, and that cannot be put together: it must not be used."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

_LOOKED_AT = frozenset({"shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "is_meta"})


class Apart(Tensor):
    """A tensor with other values on each rank of the context axis. Nothing can be done with it, but for asking its shape.

    A model may return more than a step uses: only use is an error.

    Attributes:
        reason: What is said then.
    """

    reason: str

    @classmethod
    def of(cls, value: Tensor, reason: str) -> Apart:
        """Marks a tensor."""
        # Private; checked with torch 2.13. It shares memory, and the graph is not needed any more.
        new: Apart = Tensor._make_subclass(cls, value.detach())
        new.reason = reason
        return new

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = next((value for value in _flat((args, kwargs)) if isinstance(value, Apart)), None)
        owner = getattr(func, "__self__", None)
        if found is None or (
            getattr(func, "__name__", "") == "__get__" and getattr(owner, "__name__", "") in _LOOKED_AT
        ):
            # Private; checked with torch 2.13. The public default would make this class of every result.
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise MisconfigurationException(found.reason)

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Apart({self.reason})"

    @override
    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise MisconfigurationException(self.reason)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _flat(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _flat(item)]
    return [value]

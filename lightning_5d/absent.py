"""Stand-ins for modules that this rank does not hold."""

from __future__ import annotations

import copy
import types
from functools import cache
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

Kind = TypeVar("Kind", bound="Absent")

_OWN = frozenset(vars(nn.Module()))
_VALUES = (str, bytes, bool, int, float, complex, type(None), type, torch.dtype, torch.device)


class Absent(nn.Module):
    """Takes the place of a module of which this rank holds nothing: no weights, no buffers, no modules inside.

    It looks like the module that it replaces (class, attributes with plain values, and modules inside that look alike), because
    the code around may ask: which kind of attention a layer has, or in which dtype it computes.

    Attributes:
        name: The module's fully-qualified name.
    """

    name: str
    _inside: dict[str, Absent | Tensor | None]  # tensors on the meta device

    def reason(self, attribute: str | None = None) -> str:
        """Why it cannot be used."""
        return f"{self.name} is not on this rank."

    def lost(self, attribute: str, like: Tensor) -> Tensor:
        """What a weight or buffer of the module is here.

        Args:
            attribute: Its name.
            like: A tensor of its shape and dtype, on the meta device.
        """
        raise AttributeError(self.reason(attribute))

    def received(self) -> Any:
        """What this rank has got from the ranks that hold it, while it computes with that; ``None`` for nothing."""
        return None

    # Defined here so that they come before those of the class that is looked like.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What a call of the module gives here."""
        raise RuntimeError(self.reason())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The same as a call: no hooks, since they belong to the module itself."""
        return self(*args, **kwargs)

    def __getattr__(self, attribute: str) -> Any:
        inside = self.__dict__.get("_inside", {})
        if attribute not in inside:
            return super().__getattr__(attribute)
        found = inside[attribute]
        return self.lost(attribute, found) if isinstance(found, Tensor) else found

    def extra_repr(self) -> str:
        """Says so in a printed module."""
        return "not on this rank"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self).__new__(type(self))
        nn.Module.__init__(new)
        memo[id(self)] = new
        new.__dict__.update({key: value for key, value in self.__dict__.items() if key not in _OWN})
        new.__dict__["_inside"] = copy.deepcopy(self._inside, memo)
        return new


def stand_in(kind: type[Kind], module: nn.Module, name: str, **attributes: Any) -> Kind:
    """An instance of `kind` that looks like a module.

    Args:
        kind: What it does when it is called.
        module: The module whose place it takes.
        name: The module's fully-qualified name.
        attributes: Attributes for it and for those inside of it.
    """
    module = getattr(module, "_orig_mod", module)  # what `torch.compile` has wrapped
    classes: Any = kind, type(module)  # mypy takes a class for something without a hash
    dressed = _dressed(*classes)
    new: Kind = dressed.__new__(dressed)
    nn.Module.__init__(new)
    for key, value in vars(module).items():
        if key not in _OWN and key not in ("forward", "__call__") and _is_plain(value):
            new.__dict__[key] = value
    new.training = module.training
    inside: dict[str, Any] = {}
    for key, tensor in (*module._parameters.items(), *module._buffers.items()):
        inside[key] = None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    for key, child in module._modules.items():
        inside[key] = None if child is None else stand_in(kind, child, f"{name}.{key}", **attributes)
    new.__dict__.update(attributes, name=name, _inside=inside)
    return new


@cache
def _dressed(kind: Any, looks_like: Any) -> Any:
    try:
        name, content = f"{kind.__name__}{looks_like.__name__}", {"__module__": kind.__module__}
        return type(name, (kind, looks_like), content)
    except TypeError:  # a class that cannot be inherited from
        return kind


def _is_plain(value: Any, depth: int = 3) -> bool:
    """Whether holding on to a value cannot keep a weight alive."""
    if isinstance(value, _VALUES):
        return True
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None
    if isinstance(value, Tensor | nn.Module) or callable(value) or depth == 0:
        return False
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(item, depth - 1) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(item, depth - 1) for item in value.values())
    return hasattr(value, "__dict__") and all(_is_plain(item, depth - 1) for item in vars(value).values())

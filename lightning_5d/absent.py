"""Stand-ins for modules that this rank does not hold."""

from __future__ import annotations

import types
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn

Kind = TypeVar("Kind", bound="Absent")

_OWN = frozenset(vars(nn.Module()))
_VALUES = (
    str, bytes, bool, int, float, complex, type(None), type, torch.dtype, torch.device, types.FunctionType,
    types.BuiltinFunctionType,
)  # fmt: skip


class Absent(nn.Module):
    """Takes the place of a module of which this rank holds nothing: no weights, no buffers, no modules inside.

    It looks like the module that it replaces (class, attributes with plain values), because the code around may ask: which
    kind of attention a layer has, or whether it is one.
    """

    name: str
    _lost: frozenset[str]

    def reason(self, attribute: str | None = None) -> str:
        """Why it cannot be used."""
        return f"{self.name} is not on this rank."

    # Defined here so that they come before those of the class that is looked like.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What a call of the module gives here."""
        raise RuntimeError(self.reason())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The same as a call: no hooks, since they belong to the module itself."""
        return self(*args, **kwargs)

    def __getattr__(self, attribute: str) -> Any:
        if attribute in self.__dict__.get("_lost", ()):
            raise AttributeError(self.reason(attribute))
        return super().__getattr__(attribute)

    def extra_repr(self) -> str:
        """Says so in a printed module."""
        return "not on this rank"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self).__new__(type(self))
        nn.Module.__init__(new)
        memo[id(self)] = new
        new.__dict__.update({key: value for key, value in self.__dict__.items() if key not in _OWN})
        return new


def stand_in(kind: type[Kind], module: nn.Module, name: str) -> Kind:
    """An instance of `kind` that looks like a module.

    Args:
        kind: What it does when it is called.
        module: The module whose place it takes.
        name: The module's fully-qualified name.
    """
    new = _dressed(kind, type(module))
    nn.Module.__init__(new)
    for key, value in vars(module).items():
        if key not in _OWN and key not in ("forward", "__call__") and _is_plain(value):
            new.__dict__[key] = value
    new.training = module.training
    lost = {*module._parameters, *module._buffers, *module._modules}
    new.__dict__.update(name=name, _lost=frozenset(lost))
    return new


def _dressed(kind: type[Kind], looks_like: type[nn.Module]) -> Kind:
    try:
        name, content = f"{kind.__name__}{looks_like.__name__}", {"__module__": kind.__module__}
        dressed = cast("type[Kind]", type(name, (kind, looks_like), content))
        return dressed.__new__(dressed)
    except TypeError:  # a class that cannot be inherited from, or has another layout in memory
        return kind.__new__(kind)


def _is_plain(value: Any, depth: int = 3) -> bool:
    """Whether holding on to a value cannot keep a weight alive."""
    if isinstance(value, _VALUES):
        return True
    if isinstance(value, Tensor | nn.Module | types.MethodType) or depth == 0:
        return False
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(item, depth - 1) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(item, depth - 1) for item in value.values())
    return hasattr(value, "__dict__") and all(_is_plain(item, depth - 1) for item in vars(value).values())

"""Values inside values: what users put into batches and return from steps, taken apart and put together with their types kept."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Key = Any
"""Where a child sits in its container: a key, an index or the name of a field."""

# Containers by their classes, but one value to whoever uses them.
_WHOLE = (Tensor, torch.Size, PackedSequence, str, bytes)


def children(value: Any) -> list[tuple[Key, Any]] | None:
    """What a container holds, or ``None`` for a value that is none.

    Containers are lists, tuples and named tuples, mappings of any class (also classes that only behave like one, such as
    `BatchEncoding`), and instances of dataclasses.
    """
    if isinstance(value, _WHOLE):
        return None
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if is_mapping(value):
        return [(key, value[key]) for key in value.keys()]  # noqa: SIM118 - some of them iterate over something else
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def is_mapping(value: Any) -> bool:
    """Whether it is a mapping, by class or by behaviour."""
    if isinstance(value, Mapping):
        return True
    kind = type(value)
    return not isinstance(value, type) and all(
        callable(getattr(kind, name, None)) for name in ("keys", "values", "__getitem__")
    )


def rebuilt(value: Any, parts: Mapping[Key, Any]) -> Any:
    """A container of the same type as `value` with other children.

    Args:
        value: The container that `children` took apart. It is not changed.
        parts: The new children by key.
    """
    if isinstance(value, tuple):
        items = [parts[index] for index in range(len(value))]
        return value._make(items) if hasattr(value, "_make") else of_type(value, items)
    if isinstance(value, list):
        return of_type(value, [parts[index] for index in range(len(value))])
    if is_mapping(value):
        if not hasattr(type(value), "__setitem__"):
            return type(value)(parts)  # a frozen one
        new = copy.copy(value)
        for key, part in parts.items():
            new[key] = part
        return new
    new = copy.copy(value)
    for key, part in parts.items():
        object.__setattr__(new, key, part)
    return new


def of_type(like: list[Any] | tuple[Any, ...], items: Sequence[Any]) -> Any:
    """A list or tuple of the type of `like` with these items, of any number."""
    if type(like) in (list, tuple):
        return type(like)(items)
    if isinstance(like, list):
        new = copy.copy(like)
        new[:] = items
        return new
    return tuple(items) if hasattr(like, "_make") else type(like)(items)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in `value` that is no container, with where it is, in order."""
    inside = children(value)
    if inside is None:
        yield path, value
        return
    for key, child in inside:
        yield from leaves(child, f"{path}[{key!r}]")


def has_rows(value: Any, rows: int) -> bool:
    """Whether a tensor in `value` has that many rows."""
    return any(isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == rows for _, leaf in leaves(value))


def described(value: Any) -> str:
    """A few words about a value, for messages."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    inside = children(value)
    if inside is None:
        text = repr(value)
        return text if len(text) <= 60 else f"{type(value).__name__}"
    what = ", ".join(f"{path or 'it'}: {described(leaf)}" for path, leaf in list(leaves(value))[:4])
    return f"a {type(value).__name__} of {len(inside)}" + (f" ({what})" if what else "")

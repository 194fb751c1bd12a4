"""Which tensors were computed from values that only another stage has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Self

from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._pytree import tree_leaves

# Results of these have the shape or dtype of an argument, and nothing of its values.
_SHAPES = frozenset(
    [
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "new_tensor",
    ]
)
_NUMBERS = frozenset(
    ["item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "__array__", "__complex__"]
)
_OF_THE_FIRST = frozenset(["expand_as", "view_as", "reshape_as", "type_as", "to"])


class Dependence(TorchFunctionMode):
    """Follows hollow tensors through what is computed under it.

    Stages leave it to the first run of each signature of inputs: it looks at every operation.

    Attributes:
        number: Where a tensor came from that was made a plain number, which nobody can follow.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[int, tuple[Tensor, str]] = {}
        self._on = False
        self.number: str | None = None

    def mark(self, value: Any, source: str) -> None:
        """Makes all tensors of a structure known as coming from a source."""
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                self._found[id(leaf)] = (leaf, source)  # held, or another tensor may get the same id

    def source(self, value: Any) -> str | None:
        """Where something in a structure comes from, if it depends on a hollow tensor."""
        return next((self._found[id(leaf)][1] for leaf in tree_leaves(value) if id(leaf) in self._found), None)

    def source_of_result(self, value: Any) -> str | None:
        """The same, with numbers: NaN is taken for one that was a hollow tensor, if any was."""
        lost = self.number is not None and any(isinstance(x, float) and math.isnan(x) for x in tree_leaves(value))
        return self.number if lost else self.source(value)

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation, and marks what comes out of it if something marked went in."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if not self._found or name in _SHAPES:
            return out
        source = self.source(args[:1] if name in _OF_THE_FIRST else (args, kwargs))
        if source is not None:
            if name in _NUMBERS:
                self.number = source
            self.mark(out, source)
            if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
                self.mark(args[0], source)
            self.mark(kwargs.get("out"), source)
        return out

    def __enter__(self) -> Self:
        self._on = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._on:
            self._on = False
            super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def pause(self) -> None:
        """Looks away, as compiled blocks do not like to be looked at."""
        # Private; checked with torch 2.13. Modes are a stack, and somebody may have put one on top.
        if self._on and _get_current_function_mode() is self:  # type: ignore[no-untyped-call]
            self.__exit__(None, None, None)

    def resume(self) -> None:
        """Looks again."""
        if not self._on:
            self.__enter__()

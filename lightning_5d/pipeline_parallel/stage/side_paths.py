"""Ways from blocks to a loss that do not go through what the blocks return: an attribute that a block leaves, a hook that keeps something."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lightning_5d.pipeline_parallel.stage.outline import tensors_of


class SidePaths:
    """Finds such a way on the last stage, whose blocks are not all: what the others leave is not there.

    Args:
        shared: Weights that modules outside the blocks use too, by `id`.
    """

    def __init__(self, shared: Iterable[int]) -> None:
        self._shared = frozenset(shared)
        self._weights: dict[int, tuple[Tensor, str]] = {}
        self._returned: set[Any] = set()
        self._handed_on: set[Any] = set()

    def entering(self, name: str, block: nn.Module) -> None:
        """Comes before each block, when its weights are those that it computes with."""
        for key, weight in block.named_parameters():
            if id(weight) not in self._shared:
                self._weights[id(weight)] = weight, f"{name}.{key}"  # held, or another may get the same id

    def leaving(self, output: Any) -> None:
        """Comes with what each block has returned; the last one's counts."""
        self._returned = {tensor.grad_fn for tensor in tensors_of(output) if tensor.grad_fn is not None}

    def handed_on(self, tensors: Iterable[Tensor]) -> None:
        """Comes with what stages hand on beside what blocks return: that of other stages is there, too."""
        self._handed_on |= {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}

    def find(self, result: Any) -> str | None:
        """A weight of a block on which a result depends by a side path."""
        pending = [tensor.grad_fn for tensor in tensors_of(result) if tensor.grad_fn is not None]
        seen: set[Any] = self._returned | self._handed_on
        while pending:
            node: Any = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            weight = getattr(node, "variable", None)
            if weight is not None and id(weight) in self._weights:
                return self._weights[id(weight)][1]
            pending += [following for following, _ in node.next_functions if following is not None]
        return None

"""Weights that are used by other code than their own module's, which knows nothing of their being cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_5d.tensor_parallel.layout import TensorLayout
from lightning_5d.tensor_parallel.running import Running, calling_line

OF_SHAPE = frozenset(f"{made}_like" for made in ("zeros", "ones", "full", "empty", "rand", "randn")) | frozenset(
    f"new_{what}" for what in ("zeros", "ones", "full", "empty", "tensor")
)
_OF_THE_FIRST = frozenset(["to", "type_as", "expand_as", "view_as", "reshape_as"])
# Writes, and what people write through: an average of weights is right for parts as for the whole.
_TAKEN_OFF = (*(getattr(Tensor, key).__get__ for key in ("grad", "data")), Tensor.detach)


@dataclass(frozen=True)
class Weight:
    """A weight that only some code may use.

    Attributes:
        names: All of its names.
        cut: It is cut over the ranks; otherwise they hold it whole, and each has a summand of its gradient.
        inside: Names of modules; code that runs while one of them does may use it.
    """

    names: tuple[str, ...]
    cut: bool
    inside: frozenset[str]


def used_parameters(func: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> Iterator[nn.Parameter]:
    """The parameters whose values an operation has computed with; not those that it has only written to or taken the size of."""
    name = getattr(func, "__name__", "")
    if name in OF_SHAPE or (name.endswith("_") and not name.endswith("__")) or func in _TAKEN_OFF:
        return
    for leaf in tree_leaves(args[:1] if name in _OF_THE_FIRST else (args, kwargs)):
        if isinstance(leaf, nn.Parameter) and any(isinstance(value, Tensor) for value in tree_leaves(output)):
            yield leaf


class WeightUses:
    """Looks at which weights operations take.

    Args:
        module: The module.
        layout: Its layout.
        size: Ranks on the tensor axis.
    """

    def __init__(self, module: nn.Module, layout: TensorLayout, size: int) -> None:
        self._module, self._size = module, size
        self._weights = list(_weights(module, layout))
        self._embeddings = frozenset(f"{name}.weight" for name in layout.embeddings)
        self._known: dict[int, tuple[Tensor, Weight | None]] = {}

    def look(self, func: Any, args: Any, kwargs: Mapping[str, Any], output: Any, running: Running) -> None:
        """Looks at one operation after it has run.

        Raises:
            MisconfigurationException: If it has used a weight where it may not.
        """
        for parameter in used_parameters(func, args, kwargs, output):
            weight = self._weight(parameter)
            if weight is None or not weight.inside.isdisjoint(running.names):
                continue
            line = calling_line()
            if line is not None:
                raise MisconfigurationException(self._message(weight, getattr(func, "__name__", ""), running, line))

    def _weight(self, parameter: Tensor) -> Weight | None:
        found = self._known.get(id(parameter))
        if found is None:
            # What stands in a module during a step is made in it; held, or another tensor may get the same id.
            for weight in self._weights:
                for name in weight.names:
                    owner, _, attribute = name.rpartition(".")
                    current = self._module.get_submodule(owner)._parameters.get(attribute)
                    if current is not None:
                        self._known[id(current)] = (current, weight)
            found = self._known.setdefault(id(parameter), (parameter, None))
        return found[1]

    def _message(self, weight: Weight, operation: str, running: Running, line: str) -> str:
        name = weight.names[0]
        owner = name.rpartition(".")[0]
        state = (
            f"is cut over the {self._size} ranks of the tensor axis"
            if weight.cut
            else f"is used on other activations by each of the {self._size} ranks of the tensor axis, whose gradients are added up"
        )
        text = f"{name} {state}, and {running.place} uses it otherwise than by calling {owner}: {operation}, {line}."
        if weight.names[0] in self._embeddings and operation in (
            "linear",
            "matmul",
            "mm",
            "t",
            "__get__",
            "__matmul__",
        ):
            return (
                f"{text} That is an output layer tied to the embedding. Make it a module of its own, head = nn.Linear(..., bias=False)"
                f" with head.weight = {name}, call that, and name it in the plan; or take {owner} out of the plan."
            )
        there = (
            "it is a part of the weight"
            if weight.cut
            else "each rank has the same gradient, and it would count several times"
        )
        return (
            f"{text} There {there}. Call the module; write a penalty on weights as the optimizer's weight_decay, or add its gradient in"
            f" on_before_optimizer_step, where weights and gradients are DTensors; or take {owner} out of the plan of TensorParallel."
        )


def _weights(module: nn.Module, layout: TensorLayout) -> Iterator[Weight]:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    regions = frozenset(region.name for region in layout.regions)
    blocks = frozenset() if layout.sequence is None else frozenset([*layout.sequence.blocks, layout.sequence.whole])
    for tied in names.values():
        owners = frozenset(name.rpartition(".")[0] for name in tied)
        if any(name in layout.weights for name in tied):
            yield Weight(tuple(tied), True, owners)
        elif any(name in layout.partial for name in tied):
            around = {
                outer
                for outer in regions | blocks
                if any(f"{owner}.".startswith(f"{outer}." if outer else "") for owner in owners)
            }
            yield Weight(tuple(tied), False, owners | around)

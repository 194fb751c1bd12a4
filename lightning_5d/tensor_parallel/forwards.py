"""What runs in place of modules' own forwards: classes, names and state of the modules stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_5d.pipeline_parallel.deferred_weights import DeferringForward, is_plain
from lightning_5d.pipeline_parallel.weight_products import LinearProduct, TransposedProduct, product_of
from lightning_5d.replaced_forward import AroundForward
from lightning_5d.tensor_parallel.axis import TensorAxis
from lightning_5d.tensor_parallel.regions import Linear
from lightning_5d.tensor_parallel.sequence import SequenceCut


class Forward(AroundForward):
    """Runs a module on the tensor axis.

    A copy of the module belongs to the same axis. A pickle does not: it can be looked at, and not be run.

    Args:
        module: The module.
        axis: The ranks.
        sequence: Where it gets and returns pieces of the sequence; ``None`` where it is whole.
    """

    def __init__(self, module: nn.Module, axis: TensorAxis, sequence: SequenceCut | None) -> None:
        super().__init__(module)
        self.sequence = sequence
        self._axis: TensorAxis | None = axis
        module.__dict__["forward"] = self

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "previous": self.previous, "sequence": None, "_axis": None}

    @property
    def axis(self) -> TensorAxis:
        """The ranks.

        Raises:
            RuntimeError: In a pickled copy of the module.
        """
        if self._axis is None:
            raise RuntimeError(
                f"This {type(self.module).__name__} was sent here from a process of the tensor axis, and holds only that rank's part of"
                " its weights. Load a checkpoint instead: it holds whole weights."
            )
        return self._axis

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        return self.run(*args, **kwargs)

    def close(self) -> None:
        """Gives the module its own forward back."""
        self.take_off()


class LinearForward(Forward):
    """A linear layer of which this rank has a part.

    Args:
        module: The layer.
        axis: The ranks.
        sequence: Where it gets and returns pieces of the sequence; ``None`` where it is whole.
    """

    def __init__(self, module: nn.Module, axis: TensorAxis, sequence: SequenceCut | None) -> None:
        super().__init__(module, axis, sequence)
        self._product = linear_product(module)

    @property
    def layer(self) -> Linear | None:
        """The layer as regions know it, if it is one whose products they may compute."""
        previous = self.previous
        if self._product is None or not (previous is None or isinstance(previous, DeferringForward)):
            return None
        return Linear(self._product, None if previous is None else previous.deferred)

    def weight_and_bias(self) -> tuple[Any, Any]:
        """What the layer holds now: parameters of their own are not found under a parametrization."""
        return self.module._parameters.get("weight"), self.module._parameters.get("bias")

    def plain(self, x: Any) -> bool:
        """Whether nothing but autograd looks at or changes the operands of the layer's product."""
        return self._product is not None and is_plain(x, *self.weight_and_bias(), self._product)


def linear_product(module: nn.Module) -> LinearProduct | None:
    """What a module computes, if it is a linear layer and nothing else."""
    product = product_of(module)
    return product if isinstance(product, LinearProduct) else None


def multiplied(module: nn.Module, x: Tensor, weight: Any) -> Tensor:
    """The product of a linear layer without its bias."""
    return x @ weight if isinstance(linear_product(module), TransposedProduct) else F.linear(x, weight)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def uncompiled(function: Callable[..., Any], *args: Any) -> Any:
    """Calls what communicates, or knows tensors by more than their values; compiled code is left for it."""
    return function(*args)


def nothing(*args: Any, **kwargs: Any) -> None:
    """What is left of a hook in a pickle."""

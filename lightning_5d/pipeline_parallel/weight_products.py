"""The products that layers with one weight compute, forward and backward, each gradient by itself.

Legend: N all leading dimensions together, I and O features in and out.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
import torch.nn.grad as gradients
from torch import Tensor, nn


class Product(ABC):
    """What a kind of layer computes from an input, a weight and a bias, and the gradient of each from that of its output.

    Attributes:
        dimensions: The fewest that an input has.
    """

    dimensions = 1

    @abstractmethod
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output."""

    @abstractmethod
    def input_gradient(self, grad: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        """The gradient of the input, from that of the output."""

    @abstractmethod
    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The gradient of the weight."""

    @abstractmethod
    def bias_gradient(self, grad: Tensor) -> Tensor:
        """The gradient of the bias."""

    def add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor, weight: Tensor) -> None:
        """Adds the gradient of the weight to a dense tensor of its shape."""
        total.add_(self.weight_gradient(grad, x, weight))


class LinearProduct(Product):
    """`torch.nn.Linear`: the weight is ``(O, I)``."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Product.forward`."""
        return F.linear(x, weight, bias)

    def input_gradient(self, grad: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        """See `Product.input_gradient`."""
        return grad.matmul(weight)

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """See `Product.weight_gradient`."""
        return _rows(grad).t().mm(_rows(x))

    def bias_gradient(self, grad: Tensor) -> Tensor:
        """See `Product.bias_gradient`."""
        return _rows(grad).sum(0)

    def add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor, weight: Tensor) -> None:
        """See `Product.add_weight_gradient`."""
        if total.dtype == grad.dtype:
            total.addmm_(_rows(grad).t(), _rows(x))
        else:
            super().add_weight_gradient(total, grad, x, weight)


class TransposedProduct(LinearProduct):
    """``Conv1D`` of transformers: the weight is ``(I, O)``."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Product.forward`."""
        out = _rows(x).mm(weight) if bias is None else torch.addmm(bias, _rows(x), weight)
        return out.view(*x.shape[:-1], weight.shape[1])

    def input_gradient(self, grad: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        """See `Product.input_gradient`."""
        return grad.matmul(weight.t())

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """See `Product.weight_gradient`."""
        return _rows(x).t().mm(_rows(grad))

    def add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor, weight: Tensor) -> None:
        """See `Product.add_weight_gradient`."""
        if total.dtype == grad.dtype:
            total.addmm_(_rows(x).t(), _rows(grad))
        else:
            Product.add_weight_gradient(self, total, grad, x, weight)


class ConvolutionProduct(Product):
    """`torch.nn.Conv1d`, `torch.nn.Conv2d` or `torch.nn.Conv3d` with zeros around.

    Args:
        module: The layer.
    """

    def __init__(self, module: nn.modules.conv._ConvNd) -> None:
        self.spatial = len(module.kernel_size)
        self.dimensions = self.spatial + 2
        self._options: tuple[Any, ...] = (module.stride, module.padding, module.dilation, module.groups)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Product.forward`."""
        out: Tensor = getattr(F, f"conv{self.spatial}d")(x, weight, bias, *self._options)
        return out

    def input_gradient(self, grad: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        """See `Product.input_gradient`."""
        function = getattr(gradients, f"conv{self.spatial}d_input")
        gradient: Tensor = function(x.shape, weight, grad, *self._options)
        return gradient

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """See `Product.weight_gradient`."""
        function = getattr(gradients, f"conv{self.spatial}d_weight")
        gradient: Tensor = function(x, weight.shape, grad, *self._options)
        return gradient

    def bias_gradient(self, grad: Tensor) -> Tensor:
        """See `Product.bias_gradient`."""
        return grad.sum([0, *range(2, grad.ndim)])


def product_of(module: nn.Module) -> Product | None:
    """What a module computes, if it is a layer that computes one product and nothing else."""
    forward = type(module).forward
    if forward is nn.Linear.forward:
        return LinearProduct()
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        plain = next(kind for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d) if isinstance(module, kind))
        own = forward is plain.forward and type(module)._conv_forward is plain._conv_forward
        simple = module.padding_mode == "zeros" and not isinstance(module.padding, str)
        return ConvolutionProduct(module) if own and simple else None
    # Whoever has one of these layers has imported its module.
    transformers = sys.modules.get("transformers.pytorch_utils")
    if transformers is not None and forward is transformers.Conv1D.forward:
        return TransposedProduct()
    return None


def _rows(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])

"""The backward of a stage in two halves: gradients of activations now, those of linear layers' weights when there is time.

Zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism", section 2) send the gradient of a stage's input on as soon
as it is known, and fill waits with the gradients of weights, on which nobody else depends. Nearly all of that work is matrix
products of linear layers, so those are what is put off: each of them has the two operands of its product at hand in backward.
Norms, embeddings and whatever else has weights keep their ordinary backward, in the first half.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from lightning_5d.model_flops import counted_with_backward
from lightning_5d.pipeline_parallel.weight_products import Product, product_of
from lightning_5d.replaced_forward import ReplacedForward

_PLAIN = (Tensor, nn.Parameter)
# Not by thread: on a GPU a backward runs in threads of its own.
_collecting: list[DeferredWeights] = []


class WeightQueue:
    """The gradients of weights that one backward has put off."""

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: _Entry) -> None:
        """Adds one layer's."""
        self._entries.append(entry)

    def run(self) -> None:
        """Computes them and adds them to ``grad`` of the weights; what was held for each is let go as soon as it is done.

        Raises:
            RuntimeError: If a layer's input or the gradient of its output was written to after the first half.
        """
        with torch.no_grad():
            while self._entries:
                self._entries.popleft().run()


class DeferredWeights:
    """Lets backwards over some modules put the gradients of linear layers' weights off.

    ```python
    deferred = DeferredWeights(stage.modules)
    with deferred.collecting() as queue:
        torch.autograd.backward(outputs, output_grads)  # B: gradients of inputs, and of all other weights
    ...
    queue.run()  # W: gradients of the linear layers' weights
    ```

    Each backward has a queue of its own, and queues may run in any order. A backward outside of `collecting` is an ordinary one,
    and so is that of a layer whose weight is no plain parameter, has hooks on its gradient, or is cast by autocast, and anything
    under ``create_graph``, `torch.func`, or inside of a compiled region.

    Args:
        modules: The modules whose linear layers, themselves or inside of them, take part: `torch.nn.Linear` and subclasses with
            its forward, ``Conv1D`` of transformers, and plain convolutions. A layer that already has a forward of its own, as an
            attribute of the object, is left alone. Grouped products (`expert_parallel/grouped.py`) take part wherever they are.

    Attributes:
        layers: Those found.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.queue: WeightQueue | None = None
        self.layers: list[nn.Module] = []
        self._forwards: list[DeferringForward] = []
        for module in dict.fromkeys(inner for outer in modules for inner in outer.modules()):
            product = product_of(module)
            if product is None or "forward" in module.__dict__:
                continue
            forward = DeferringForward(module, product, self)
            module.__dict__["forward"] = forward
            self.layers.append(module)
            self._forwards.append(forward)

    @contextmanager
    def collecting(self) -> Iterator[WeightQueue]:
        """A context for one backward, which puts gradients of weights off into the queue that it gives."""
        before, self.queue = self.queue, WeightQueue()
        _collecting.append(self)
        try:
            yield self.queue
        finally:
            _collecting.pop()
            self.queue = before

    @staticmethod
    def collecting_now() -> DeferredWeights | None:
        """What collects in the backward that runs: for products that belong to no layer, and ask in their own backward."""
        return _collecting[-1] if _collecting else None

    def put_off(
        self, product: Product, x: Tensor, grad: Tensor, weight: nn.Parameter | None, bias: nn.Parameter | None
    ) -> tuple[bool, bool]:
        """Leaves the gradients of a layer's weight and bias to the present queue, as far as there is one and they can wait.

        Args:
            product: What the layer computes.
            x: Its input.
            grad: The gradient of its output.
            weight: Its weight, if that needs a gradient.
            bias: The same of its bias.

        Returns:
            Whether the gradient of the weight, and that of the bias, is still to be computed now.
        """
        put_weight = self.queue is not None and weight is not None and _can_wait(weight)
        put_bias = self.queue is not None and bias is not None and _can_wait(bias)
        if self.queue is not None and (put_weight or put_bias):
            self.queue.put(_Entry(product, weight if put_weight else None, bias if put_bias else None, x, grad))
        return weight is not None and not put_weight, bias is not None and not put_bias

    def close(self) -> None:
        """Gives the modules their own forwards back. Queues that are not empty can still run."""
        for forward in self._forwards:
            forward.deferred = None
            if forward.module.__dict__.get("forward") is forward:
                del forward.module.__dict__["forward"]
        self._forwards.clear()


class DeferringForward(ReplacedForward):
    """Runs a linear layer whose weight's gradient may be left for later."""

    def __init__(self, module: nn.Module, product: Product, deferred: DeferredWeights) -> None:
        super().__init__(module)
        self.product = product
        self.deferred: DeferredWeights | None = deferred

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the layer belongs to no schedule.
        return {"module": self.module, "previous": self.previous, "product": self.product}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, deferred=None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer."""
        if torch.compiler.is_compiling() or self.deferred is None or len(args) != 1 or kwargs:
            return self.original(*args, **kwargs)
        x = args[0]
        # Not through `nn.Module.__getattr__`, which costs as much as all of this; a parametrized weight is not found here.
        weight, bias = self.module._parameters.get("weight"), self.module._parameters.get("bias")
        if (
            weight is not None
            and weight.requires_grad
            and torch.is_grad_enabled()
            and is_plain(x, weight, bias, self.product)
        ):
            with counted_with_backward(x, weight):
                return _Deferring.apply(x, weight, bias, self.product, self.deferred)  # type: ignore[no-untyped-call]
        return self.original(x)


def is_plain(x: Any, weight: Any, bias: Any, product: Product) -> bool:
    """Whether a layer may compute its product from these operands itself: nothing but autograd looks at or changes them."""
    return bool(
        type(x) in _PLAIN
        and type(weight) is nn.Parameter
        and (bias is None or type(bias) is nn.Parameter)
        and not x.is_nested
        and x.layout is torch.strided
        and x.ndim >= product.dimensions
        and _ordinary_autograd()
        and _not_cast(x, weight, bias)
    )


def _ordinary_autograd() -> bool:
    # Private names checked with torch 2.13: the first is what `Function.apply` itself asks.
    return not (
        torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state()
    )


def _not_cast(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether autocast, if it is on, would leave the operands as they are."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return True
    dtype = torch.get_autocast_dtype(kind)
    return x.dtype == weight.dtype == dtype and (bias is None or bias.dtype == dtype)


def _can_wait(parameter: nn.Parameter) -> bool:
    """Whether nobody else expects to see the parameter's gradient in the first half."""
    # Private names checked with torch 2.13, which calls hooks after accumulation in the first half too, where nothing has come.
    # Those of this package's axes take that; of anybody else's, one is enough to leave the gradient there.
    return not parameter._backward_hooks and all(map(_is_ours, (parameter._post_accumulate_grad_hooks or {}).values()))


def _is_ours(hook: Callable[..., Any]) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


class _Deferring(torch.autograd.Function):
    """A layer whose backward may leave the gradients of weight and bias to a queue."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        product: Product,
        deferred: DeferredWeights,
    ) -> Tensor:
        ctx.save_for_backward(x, weight if x.requires_grad else None)
        ctx.layer = product, deferred, weight, bias
        return product.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        product, deferred, weight, bias = ctx.layer
        x, saved_weight = ctx.saved_tensors
        of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        grad_x = product.input_gradient(grad, saved_weight, x) if of_x else None
        grad_weight = grad_bias = None
        if not torch.is_grad_enabled():
            of_weight, of_bias = deferred.put_off(
                product, x, grad, weight if of_weight else None, bias if of_bias else None
            )
        if of_weight:
            grad_weight = product.weight_gradient(grad, x, weight)
        if of_bias:
            grad_bias = product.bias_gradient(grad)
        return grad_x, grad_weight, grad_bias, None, None


class _Entry:
    """The operands of one layer's products."""

    __slots__ = ("bias", "grad", "product", "versions", "weight", "x")

    def __init__(
        self, product: Product, weight: nn.Parameter | None, bias: nn.Parameter | None, x: Tensor, grad: Tensor
    ) -> None:
        self.product, self.weight, self.bias, self.x, self.grad = product, weight, bias, x, grad
        self.versions = x._version, grad._version

    def run(self) -> None:
        product, x, grad = self.product, self.x, self.grad
        if (x._version, grad._version) != self.versions:
            shape = " x ".join(map(str, x.shape))
            raise RuntimeError(
                f"The input of a layer ({shape}), or the gradient of its output, was written to in place between the two halves of"
                " the layer's backward, so the gradient of its weight cannot be computed."
            )
        if (weight := self.weight) is not None:
            if _takes(weight.grad):
                product.add_weight_gradient(weight.grad, grad, x, weight)
            else:
                _put(weight, product.weight_gradient(grad, x, weight))
            _tell(weight)
        if (bias := self.bias) is not None:
            if _takes(bias.grad):
                bias.grad.add_(product.bias_gradient(grad))
            else:
                _put(bias, product.bias_gradient(grad))
            _tell(bias)


def _takes(total: Tensor | None) -> TypeGuard[Tensor]:
    """Whether a gradient can be added to in place."""
    return type(total) is Tensor and total.layout is torch.strided


def _put(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Makes a gradient the parameter's first, or adds it to one of another kind (a sparse one), as autograd does."""
    if parameter.grad is not None:
        parameter.grad = gradient + parameter.grad
        return
    dtype = parameter.grad_dtype or gradient.dtype
    if gradient.dtype != dtype or gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter, dtype=dtype).copy_(gradient)
    parameter.grad = gradient


def _tell(parameter: nn.Parameter) -> None:
    """Calls the hooks that autograd calls when it has added a gradient."""
    if parameter._post_accumulate_grad_hooks:
        for hook in tuple(parameter._post_accumulate_grad_hooks.values()):
            hook(parameter)

"""What happens at the borders of regions, forward and backward.

Inside a region each rank computes with its own columns and rows of the weights, on an input that all ranks have whole. Going in,
values stay and gradients are summed over the ranks; coming out, values are summed and gradients stay (Shoeybi et al.,
"Megatron-LM", section 3). Where the sequence is cut outside of regions, going in joins its pieces, coming out leaves each rank the
sum of its own piece, and backward the other way round (Korthikanti et al., "Reducing Activation Recomputation", section 4.2).
"""

# [Note: gradients of columns]
# Nobody waits for the gradients of weights, but the modules before a region wait for that of its input, which has to travel. So it
# comes first. In backward the column layers compute nothing: they tell the entry what came, and the entry, whose backward runs when
# all of them have been there, forms the gradient of the input where other ranks can read it (one product after the other is added
# to it, so that no layer's share exists by itself), sends it, computes the gradients of weights, and then waits.
# For autograd the weights are inputs of the entry too, and their gradients its results: hooks, frozen weights, accumulation and
# `torch.autograd.grad` are its business as ever. A column layer computes everything itself, in its own backward, where the
# entry will not run in the present backward or somebody watches the entered tensor.
#
# Where a schedule collects gradients of weights for later (`pipeline_parallel/deferred_weights.py`), the entry hands them on.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_5d.first_derivatives import of_tensor_axis
from lightning_5d.model_flops import counted_with_backward
from lightning_5d.pipeline_parallel.deferred_weights import DeferredWeights
from lightning_5d.pipeline_parallel.weight_products import Product, TransposedProduct
from lightning_5d.tensor_parallel.axis import Arriving, TensorAxis
from lightning_5d.tensor_parallel.pieces import Pieces

_ENTRY = "_fived_entry"


class Linear:
    """One layer as regions know it.

    Args:
        product: What it computes.
        deferred: Collects gradients of weights for later.
    """

    def __init__(self, product: Product, deferred: DeferredWeights | None = None) -> None:
        self.product, self.deferred = product, deferred

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight as (features out, features in)."""
        return weight.t() if isinstance(self.product, TransposedProduct) else weight

    def gradients(
        self,
        grad: Tensor,
        x: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        of_weight: bool,
        of_bias: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of weight and bias, as far as they are asked for and not left for later."""
        if self.deferred is not None:
            of_weight, of_bias = self.deferred.put_off(
                self.product, x, grad, weight if of_weight else None, bias if of_bias else None
            )
        return (
            self.product.weight_gradient(grad, x, weight) if of_weight else None,
            self.product.bias_gradient(grad) if of_bias else None,
        )


class _Share:
    """What came to one column layer in backward."""

    __slots__ = ("bias", "grad", "layer", "needs", "weight", "x")

    def __init__(
        self,
        layer: Linear,
        grad: Tensor,
        x: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        needs: tuple[bool, bool],
    ) -> None:
        self.layer, self.grad, self.x, self.weight, self.bias, self.needs = layer, grad, x, weight, bias, needs


class Entry:
    """One tensor's way into a region.

    Args:
        parameters: The weights and biases of the column layers that may get it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._parameters = tuple(parameters)
        self._shares: list[_Share] = []
        self._backward = -1

    def put(self, share: _Share) -> None:
        """Comes from column layers in backward."""
        backward = _backward_id()
        if backward != self._backward:  # what an earlier one has left here, it has failed before the end
            self._backward, self._shares = backward, []
        self._shares.append(share)

    def take(self) -> list[_Share]:
        """What has come in the present backward."""
        shares, self._shares = self._shares, []
        return shares if self._backward == _backward_id() else []


def enter(x: Tensor, axis: TensorAxis, pieces: Pieces | None = None, parameters: Sequence[nn.Parameter] = ()) -> Tensor:
    """Takes a tensor into a region.

    Args:
        x: What all ranks hold, or each its piece of.
        axis: The ranks.
        pieces: How `x` is cut; ``None`` if it is whole.
        parameters: The weights and biases of the column layers that may get it.

    Returns:
        The whole tensor.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x if pieces is None else pieces.join(x)
    own = [parameter for parameter in parameters if parameter.requires_grad and type(parameter) is nn.Parameter]
    entry = Entry(own)
    inside: Tensor = _Enter.apply(x, entry, axis, pieces, *own)  # type: ignore[no-untyped-call]
    inside.__dict__[_ENTRY] = entry
    return inside


def column(x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, layer: Linear) -> Tensor:
    """A layer with some of the columns, on an entered tensor or what has become of it."""
    entry = x.__dict__.get(_ENTRY)
    with counted_with_backward(x, weight):
        out: Tensor = _Column.apply(x, weight, bias, layer, entry)  # type: ignore[no-untyped-call]
    return out


def row(
    x: Tensor,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    layer: Linear,
    axis: TensorAxis,
    pieces: Pieces | None = None,
) -> Tensor:
    """A layer with some of the rows, and the way out of the region; the bias comes after the sum."""
    with counted_with_backward(x, weight):
        out: Tensor = _Row.apply(x, weight, bias, layer, axis, pieces)  # type: ignore[no-untyped-call]
    return out


def leave(partial: Tensor, axis: TensorAxis, pieces: Pieces | None = None) -> Tensor:
    """The way out of a region: the sum over the ranks, or this rank's piece of it."""
    out: Tensor = _Leave.apply(partial, axis, pieces)  # type: ignore[no-untyped-call]
    return out


def take(whole: Tensor, pieces: Pieces) -> Tensor:
    """This rank's piece of what all hold; backward joins the gradients of the pieces."""
    out: Tensor = _Take.apply(whole, pieces)  # type: ignore[no-untyped-call]
    return out


def join(piece: Tensor, pieces: Pieces) -> Tensor:
    """The pieces of all ranks together; backward takes this rank's piece of a gradient that all ranks have."""
    out: Tensor = _Join.apply(piece, pieces)  # type: ignore[no-untyped-call]
    return out


def head(x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, layer: Linear, axis: TensorAxis) -> Tensor:
    """A column layer with an entry of its own.

    Where `x` is what `join` has made of pieces, its gradient goes to the pieces directly, as their sum.
    """
    found = joined_from(x)
    if found is None:
        parameters = [weight] if bias is None else [weight, bias]
        return column(enter(x, axis, None, parameters), weight, bias, layer)
    piece, pieces = found
    with counted_with_backward(x, weight):
        out: Tensor = _JoinedColumn.apply(piece, x.detach(), weight, bias, layer, pieces)  # type: ignore[no-untyped-call]
    return out


def joined_from(x: Tensor) -> tuple[Tensor, Pieces] | None:
    """The piece that `x` was made of by `join`, if nothing but full slices of it were taken since."""
    node: Any = x.grad_fn
    for _ in range(8):
        if node is None:
            return None
        if isinstance(node, _joined):
            piece, pieces, shape = node.piece, node.pieces, node.shape
            return (piece, pieces) if piece is not None and shape == x.shape else None
        if node.name() not in ("SliceBackward0", "AliasBackward0"):
            return None
        node = node.next_functions[0][0]
    return None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, entry: Entry, axis: TensorAxis, pieces: Pieces | None, *parameters: nn.Parameter
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.entry, ctx.axis, ctx.pieces = entry, axis, pieces
        return x.detach() if pieces is None else pieces.join(x)

    @staticmethod
    @of_tensor_axis
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        entry: Entry = ctx.entry
        shares = entry.take()
        gradients: list[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 4)
        arriving: Arriving | None = None
        if ctx.needs_input_grad[0] and (shares or grad is not None):
            total = _input_gradient(grad, shares, ctx.axis)
            arriving = ctx.axis.start_sum(total) if ctx.pieces is None else ctx.pieces.start_scatter_sum(total)
        for share in shares:
            of_weight, of_bias = share.layer.gradients(share.grad, share.x, share.weight, share.bias, *share.needs)
            _add(gradients, entry.places.get(id(share.weight)), of_weight)
            _add(gradients, entry.places.get(id(share.bias)), of_bias)
        return (None if arriving is None else arriving.wait(), None, None, None, *gradients)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, layer: Linear, entry: Entry | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.entry, ctx.weight, ctx.bias = layer, entry, weight, bias
        return layer.product.forward(x, weight, bias)

    @staticmethod
    @of_tensor_axis
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer: Linear = ctx.layer
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        if of_x and _entry_will_run(ctx, x, of_weight, of_bias):
            ctx.entry.put(_Share(layer, grad, x, ctx.weight, ctx.bias, (of_weight, of_bias)))
            return None, None, None, None, None
        grad_x = layer.product.input_gradient(grad, weight, x) if of_x else None
        return grad_x, *layer.gradients(grad, x, ctx.weight, ctx.bias, of_weight, of_bias), None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        layer: Linear,
        axis: TensorAxis,
        pieces: Pieces | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.pieces, ctx.weight, ctx.bias = layer, pieces, weight, bias
        matrix = layer.matrix(weight)
        partial = axis.empty((*x.shape[:-1], matrix.shape[0]), x)
        torch.mm(_rows(x), matrix.t(), out=partial.view(-1, matrix.shape[0]))
        out = (axis.start_sum(partial) if pieces is None else pieces.start_scatter_sum(partial)).wait()
        return out if bias is None else out.add_(bias)

    @staticmethod
    @of_tensor_axis
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer: Linear = ctx.layer
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        # With pieces, each rank has that part of the bias's gradient which comes from its own.
        grad_bias = layer.product.bias_gradient(grad) if of_bias else None
        whole = grad if ctx.pieces is None or not (of_x or of_weight) else ctx.pieces.join(grad)
        grad_x = layer.product.input_gradient(whole, weight, x) if of_x else None
        grad_weight, _ = layer.gradients(whole, x, ctx.weight, None, of_weight, False)
        return grad_x, grad_weight, grad_bias, None, None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: TensorAxis, pieces: Pieces | None) -> Tensor:
        ctx.pieces = pieces
        return axis.sum(partial) if pieces is None else pieces.start_scatter_sum(partial).wait()

    @staticmethod
    @of_tensor_axis
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad if ctx.pieces is None else ctx.pieces.join(grad), None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, pieces: Pieces) -> Tensor:
        ctx.pieces = pieces
        return pieces.take(whole)

    @staticmethod
    @of_tensor_axis
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.pieces.join(grad), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, pieces: Pieces) -> Tensor:
        # A head that follows goes back to the piece; it lives until this backward.
        ctx.piece, ctx.pieces = piece if piece.requires_grad else None, pieces
        joined = pieces.join(piece)
        ctx.shape = joined.shape
        return joined

    @staticmethod
    @of_tensor_axis
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.pieces.take(grad), None


class _JoinedColumn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        piece: Tensor,
        whole: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        layer: Linear,
        pieces: Pieces,
    ) -> Tensor:
        ctx.save_for_backward(whole, weight)
        ctx.layer, ctx.pieces, ctx.weight, ctx.bias = layer, pieces, weight, bias
        return layer.product.forward(whole, weight, bias)

    @staticmethod
    @of_tensor_axis
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        whole, weight = ctx.saved_tensors
        of_piece, _, of_weight, of_bias, *_ = ctx.needs_input_grad
        arriving: Arriving | None = None
        if of_piece:
            share = _Share(ctx.layer, grad, whole, weight, None, (False, False))
            arriving = ctx.pieces.start_scatter_sum(_input_gradient(None, [share], ctx.pieces.axis))
        gradients = ctx.layer.gradients(grad, whole, ctx.weight, ctx.bias, of_weight, of_bias)
        return None if arriving is None else arriving.wait(), None, *gradients, None, None


# What torch calls the node of `_Join` in a graph.
_joined: Any = _Join._backward_cls


def _input_gradient(grad: Tensor | None, shares: Sequence[_Share], axis: TensorAxis) -> Tensor:
    """The gradient of an entered tensor: what came to the column layers, and what else came to it."""
    if not shares:
        if grad is None:
            raise RuntimeError("No gradient has come to a region's entry.")
        return grad
    first = shares[0]
    width = first.layer.matrix(first.weight).shape[1]
    total = axis.empty((*first.grad.shape[:-1], width), first.grad)
    flat = total.view(-1, width)
    if grad is not None:
        total.copy_(grad)
    for number, share in enumerate(shares):
        matrix = share.layer.matrix(share.weight)
        if number or grad is not None:
            flat.addmm_(_rows(share.grad), matrix)
        else:
            torch.mm(_rows(share.grad), matrix, out=flat)
    return total


def _entry_will_run(ctx: Any, x: Tensor, of_weight: bool, of_bias: bool) -> bool:
    """Whether the entry of a column layer's input comes later in the present backward, and nobody looks at what comes to it."""
    entry: Entry | None = ctx.entry
    if entry is None or x._backward_hooks or x.retains_grad:
        return False
    if (of_weight and id(ctx.weight) not in entry.places) or (of_bias and id(ctx.bias) not in entry.places):
        return False
    node: Any = ctx.next_functions[0][0]
    # Private; checked with torch 2.13. The entered tensor is another one if somebody has written to it in place.
    return getattr(node, "entry", None) is entry and torch._C._will_engine_execute_node(node)


def _add(gradients: list[Tensor | None], place: int | None, gradient: Tensor | None) -> None:
    if gradient is None or place is None:
        return
    before = gradients[place]
    gradients[place] = gradient if before is None else before.add_(gradient)


def _backward_id() -> int:
    return torch._C._current_graph_task_id()  # private; checked with torch 2.13


def _rows(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])

"""What a module that a plan names is made of: a linear layer, alone or inside an adapter such as LoRA's."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor, nn

_NAMED_IN = re.compile(r"(^|[._])(a|down)([._]|$)", re.IGNORECASE)
_NOT_LINEAR = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Softplus, nn.LayerNorm)


@dataclass(frozen=True)
class Layer:
    """A linear layer, and what an adapter puts beside it.

    Attributes:
        name: What the plan names; the linear layer itself, or the module around it.
        base: The linear layer.
        linear: That module.
        ins: Weights that take its input to something smaller (LoRA's A), by name.
        outs: Weights that take something smaller to its output (LoRA's B), by name.
        out_vectors: Vectors with one value per output (a bias of B, a magnitude).
        in_vectors: Vectors with one value per input.
    """

    name: str
    base: str
    linear: nn.Linear
    ins: tuple[str, ...] = ()
    outs: tuple[str, ...] = ()
    out_vectors: tuple[str, ...] = ()
    in_vectors: tuple[str, ...] = ()


def read_layer(root: nn.Module, name: str) -> Layer | str:
    """The linear layer that a name stands for, or why there is none, as the end of a sentence that begins with the name."""
    module = root.get_submodule(name)
    if isinstance(module, nn.MultiheadAttention):
        return "is an nn.MultiheadAttention, which keeps queries, keys and values in one packed weight and does not call its layers"
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return "is a Conv1D, whose weight lies the other way round (inputs, outputs)"
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return f"is a convolution ({type(module).__name__})"
    linears = [(n, m) for n, m in module.named_modules() if isinstance(m, nn.Linear)]
    if not linears:
        return f"is a {type(module).__name__}, which is no nn.Linear"
    inner, linear = (
        ("", module)
        if isinstance(module, nn.Linear)
        else max(linears, key=lambda pair: pair[1].in_features * pair[1].out_features)
    )
    parent = root.get_submodule(name.rpartition(".")[0])
    if isinstance(parent, nn.MultiheadAttention):
        return "belongs to an nn.MultiheadAttention, which does not call it"
    base = f"{name}.{inner}" if inner else name
    if (trouble := _weight_trouble(linear)) is not None:
        return trouble
    if module is linear and len(list(module.named_parameters())) <= 2:
        return Layer(name, base, linear)
    return _adapter(module, Layer(name, base, linear), inner)


def _weight_trouble(linear: nn.Linear) -> str | None:
    if hasattr(linear, "parametrizations"):
        return "has a parametrization (torch.nn.utils.parametrize), which computes its weight from whole ones"
    weight = linear._parameters.get("weight")
    if weight is None:
        return "has no parameter `weight` (nn.utils.weight_norm and the like compute it from others)"
    if tuple(weight.shape) != (linear.out_features, linear.in_features):
        shape = " x ".join(map(str, weight.shape))
        return f"has a weight of {shape} for {linear.in_features} inputs and {linear.out_features} outputs (quantized, or not yet made)"
    return None


def _adapter(module: nn.Module, layer: Layer, inner: str) -> Layer | str:
    kind = type(module).__name__
    base_weights = {id(p) for p in layer.linear._parameters.values() if p is not None and _is_base(p, layer.linear)}
    inputs, outputs = layer.linear.in_features, layer.linear.out_features
    found: dict[str, list[str]] = {"ins": [], "outs": [], "out_vectors": [], "in_vectors": []}
    for name, weight in module.named_parameters():
        if id(weight) in base_weights:
            continue
        side = _side(name, weight, inputs, outputs)
        if side is None:
            shape = " x ".join(map(str, weight.shape))
            return (
                f"is a {kind} whose {name} ({shape}) neither takes its {inputs} inputs nor gives its {outputs} outputs"
            )
        if side:
            found[side].append(f"{layer.name}.{name}")
    ranks = [
        sorted(module.get_parameter(n[len(layer.name) + 1 :]).shape[d] for n in found[side])
        for side, d in (("ins", 0), ("outs", 1))
    ]
    if ranks[0] != ranks[1]:
        return f"is a {kind}, which is neither an nn.Linear nor an adapter around one"
    between = [type(m).__name__ for m in module.modules() if isinstance(m, _NOT_LINEAR)]
    if between:
        return f"is a {kind} with a {between[0]} inside, which cannot act on a summand of a sum over ranks"
    return Layer(layer.name, layer.base, layer.linear, **{side: tuple(names) for side, names in found.items()})


def _is_base(weight: Tensor, linear: nn.Linear) -> bool:
    return weight is linear._parameters.get("weight") or weight is linear._parameters.get("bias")


def _side(name: str, weight: Tensor, inputs: int, outputs: int) -> str | None:
    """Which of an adapter's sides a weight belongs to: ``""`` for neither, as scales and ranks do, ``None`` if it fits nowhere."""
    if weight.ndim <= 1:
        if weight.numel() == outputs:
            return "out_vectors"
        return "in_vectors" if weight.numel() == inputs else ""
    if weight.ndim != 2:
        return None
    takes, gives = weight.shape[1] == inputs, weight.shape[0] == outputs
    if takes and gives:
        return "ins" if _NAMED_IN.search(name.removesuffix(".weight")) else "outs"
    return "ins" if takes else "outs" if gives else None

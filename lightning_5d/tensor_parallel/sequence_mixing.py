"""Code that mixes positions of a sequence of which, with sequence parallelism, each rank has a part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_5d.parallelism import Problem
from lightning_5d.tensor_parallel.layout import TensorLayout

_MODULES = (
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
)


def mixing_problems(module: nn.Module, layout: TensorLayout) -> list[Problem]:
    """Modules inside blocks and outside of regions that are known to mix positions; none without sequence parallelism.

    Args:
        module: The whole module.
        layout: Its layout.
    """
    if layout.sequence is None:
        return []
    regions = tuple(f"{region.name}." for region in layout.regions if region.door == "module")
    problems = _collecting(module)
    for block in layout.sequence.blocks:
        try:
            inside = module.get_submodule(block)
        except AttributeError:  # of another stage
            continue
        for name, inner in inside.named_modules(prefix=block):
            if not isinstance(inner, _MODULES) or f"{name}.".startswith(regions) or _is_pointwise(inner):
                continue
            problems.append(
                Problem(
                    f"{name} ({type(inner).__name__}) mixes positions, of which each rank has a part with sequence_parallel=True: it is"
                    f" inside the block {block} and outside of the regions where the sequence is whole.",
                    "Use TensorParallel without sequence_parallel.",
                )
            )
    return problems


def _collecting(module: nn.Module) -> list[Problem]:
    """Settings of Hugging Face models that have hooks keep what blocks compute, of which each rank has a part."""
    problems = []
    for name, inner in module.named_modules():
        config = getattr(inner, "config", None)
        for flag in ("output_router_logits", "output_hidden_states"):
            if config is not None and getattr(config, flag, False) is True:
                what = f"{name or type(inner).__name__} has config.{flag}=True: with sequence_parallel=True each rank keeps those of its own tokens."
                problems.append(Problem(what, f"Set {flag}=False, or use TensorParallel without sequence_parallel."))
        if problems:
            break  # modules inside share the config
    return problems


def _is_pointwise(module: nn.Module) -> bool:
    size = getattr(module, "kernel_size", None)
    return isinstance(module, nn.modules.conv._ConvNd) and set(size if isinstance(size, tuple) else ()) == {1}


# Where operations take the dimension along which they work.
DIMENSION = {
    **dict.fromkeys(
        ["sum", "mean", "amax", "amin", "max", "min", "prod", "var", "std", "median", "argmax", "argmin"], 1
    ),
    **dict.fromkeys(
        ["softmax", "log_softmax", "logsumexp", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"], 1
    ),
    **dict.fromkeys(["sort", "argsort", "flip"], 1),
    **dict.fromkeys(["roll", "topk", "norm", "diff"], 2),
}


def mixes_positions(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], length: int, batch: int
) -> bool:
    """Whether an operation makes something of several positions.

    Args:
        func: The operation.
        args: Its positional arguments, the tensor first.
        kwargs: Its keyword arguments.
        length: Positions that this rank has. Tensors (B, length, …) have them along dimension 1.
        batch: Sequences in the batch.
    """
    x = args[0] if args else kwargs.get("input", kwargs.get("query"))
    if not isinstance(x, Tensor) or x.ndim < 3:
        return False
    name = getattr(func, "__name__", "")
    if func is F.scaled_dot_product_attention:
        return x.shape[-2] == length
    if name in ("conv1d", "avg_pool1d", "max_pool1d", "adaptive_avg_pool1d"):
        return x.shape[2] == length and not (name == "conv1d" and args[1].shape[2] == 1)
    if x.shape[1] != length or (length > 1 and x.shape[0] == batch * length):
        return False  # the second has one row for each token: a router's choices, say
    if name == "__getitem__":
        return _picks(args[1], length)
    if name == "pad":
        widths = args[1] if len(args) > 1 else kwargs["pad"]
        before = 2 * (x.ndim - 2)
        return any(widths[before : before + 2])
    if name not in DIMENSION:
        return False
    place = DIMENSION[name]
    dims = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else None))
    given = dims if isinstance(dims, tuple | list) else (dims,)
    return any(isinstance(dim, int) and not isinstance(dim, bool) and dim % x.ndim == 1 for dim in given)


def _picks(index: Any, length: int) -> bool:
    """Whether an index takes some of the positions."""
    if not isinstance(index, tuple) or len(index) < 2 or not isinstance(index[0], slice):
        return False
    second = index[1]
    if isinstance(second, slice):
        return second.indices(length) != (0, length, 1)
    return second is not None and second is not Ellipsis

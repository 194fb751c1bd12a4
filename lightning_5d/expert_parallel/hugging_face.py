"""The experts of Hugging Face's models: which modules they are, and what they make of rows that are sorted by expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_5d.expert_parallel.found import FoundExperts
from lightning_5d.expert_parallel.grouped import grouped_linear

# What `transformers.integrations.moe.use_experts_implementation`, which decorates all of them, sets on a module; checked with transformers
# 5.24. Nothing of transformers is imported: a run without it must not need it.
_SETTINGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")


def is_hugging_face(module: nn.Module) -> bool:
    """Whether a module holds the experts of a layer the way transformers wants it, for all of its ways of computing them."""
    given = vars(module)
    settings = all(isinstance(given.get(name), bool) for name in _SETTINGS)
    return settings and "config" in given and callable(getattr(module, "_apply_gate", None))


def described(name: str, module: nn.Module, top_k: int | None) -> FoundExperts | str:
    """Such a module as this package knows experts, or why it cannot be one.

    Args:
        name: Its name in the whole module.
        module: One of which `is_hugging_face` holds.
        top_k: Experts that each token is sent to.
    """
    expected = _weights(module)
    own = dict(module.named_parameters())
    if missing := [key for key in expected if key not in own]:
        return f"has no {' and no '.join(missing)}"
    if others := [key for key in own if key not in expected]:
        return f"has {' and '.join(others)}, which all of its experts share"
    if next(module.buffers(), None) is not None or not all(own[key].is_floating_point() for key in expected):
        return "is quantised"
    if vars(module).get("_is_expert_parallel"):
        return "is spread by transformers' own expert parallelism already (distributed_config, tp_plan)"
    sizes = {own[key].shape[0] for key in expected}
    if len(sizes) != 1:
        return f"has weights for {' and '.join(str(size) for size in sorted(sizes))} experts"
    first, bias = expected[0], bool(module.has_bias)
    across = 2 if module.is_transposed else 1
    return FoundExperts(
        name=name,
        module=module,
        count=sizes.pop(),
        top_k=top_k,
        stacked=expected,
        compute=compute,
        # A bias of the second product would be added once by each rank that has a part.
        tensor_dims={} if bias else {first: across, "down_proj": 3 - across},
        # Interleaved, a part of the rows has whole pairs.
        halves=frozenset({first} if module.has_gate and module.is_concatenated and not bias else ()),
    )


def compute(module: nn.Module, rows_SD: Tensor, counts_M: Tensor) -> Tensor:
    """What the experts of a layer make of rows, as `transformers.integrations.moe.grouped_mm_experts_forward` does, without the sum.

    Args:
        module: The layer's experts, with the weights of M of them.
        rows_SD: Rows sorted by expert.
        counts_M: Rows of each, on the CPU.

    Returns:
        (S, D).
    """
    first, *_ = _weights(module)
    inner = _linear(module, first, rows_SD, counts_M)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)  # type: ignore[operator]
    return _linear(module, "down_proj", inner, counts_M)


def _weights(module: nn.Module) -> tuple[str, ...]:
    first = "gate_up_proj" if module.has_gate else "up_proj"
    return (first, f"{first}_bias", "down_proj", "down_proj_bias") if module.has_bias else (first, "down_proj")


def _linear(module: nn.Module, key: str, rows_SI: Tensor, counts_M: Tensor) -> Tensor:
    weights: Tensor = getattr(module, key)
    out = grouped_linear(
        rows_SI.to(weights.dtype), weights.transpose(1, 2) if module.is_transposed else weights, counts_M
    )
    if not module.has_bias:
        return out
    bias_MO: Tensor = getattr(module, f"{key}_bias")
    return out + torch.repeat_interleave(bias_MO, counts_M.to(bias_MO.device), dim=0, output_size=len(out))

"""Attention of some queries over some keys on ATen's fused kernels, with the log-sum-exp by which parts are joined.

A part of the keys gives an output and the logarithm of what its softmax was divided by; two parts are joined exactly from these, and
the backward of a part takes the output and the log-sum-exp of the whole. So parts need no other kernel than the whole has.

Shape suffixes: B sequences, H query heads, K key and value heads (K divides H), q queries, k keys, D head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Called directly, since torch has no public attention with log-sum-exp and a backward of parts on CPU (checked with 2.13).
_ATEN = torch.ops.aten
_cpu: Any = _ATEN._scaled_dot_product_flash_attention_for_cpu.default
_cpu_backward: Any = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
_flash: Any = _ATEN._scaled_dot_product_flash_attention.default
_flash_backward: Any = _ATEN._scaled_dot_product_flash_attention_backward.default
_efficient: Any = _ATEN._scaled_dot_product_efficient_attention.default
_efficient_backward: Any = _ATEN._scaled_dot_product_efficient_attention_backward.default

_HALF = (torch.float16, torch.bfloat16)
_CPU_TYPES = (torch.float32, torch.float64, *_HALF)
_INF = float("inf")
# What the kernels on CUDA want: flash a head size that is a multiple of 8 and at most 256, efficient attention biases whose rows
# are aligned to 16 numbers, and it pads the log-sum-exp to a multiple of 32 queries.
_FLASH_HEAD, _HEAD_MULTIPLE, _BIAS_MULTIPLE, _LSE_MULTIPLE = 256, 8, 16, 32


class Gradients(NamedTuple):
    """Of one part, in the dtype of its inputs."""

    q_BHqD: Tensor
    k_BKkD: Tensor
    v_BKkD: Tensor


def forward(
    q_BHqD: Tensor,
    k_BKkD: Tensor,
    v_BKkD: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention over these keys alone.

    Args:
        q_BHqD: Queries; no tensor may be empty.
        k_BKkD: Keys.
        v_BKkD: Values, of the same head size.
        causal: Query i sees keys 0 to i (of these; the same number of both).
        mask: (B|1, 1|H, q, k), bool: the pairs that count. Not together with `causal`.
        scale: Of the scores.

    Returns:
        The output (B, H, q, D) in the dtype of `q`, and the log-sum-exp of the scores (B, H, q) in fp32 (fp64 of fp64). A query that sees no
        key has output 0 and -inf.

    Raises:
        ValueError: If no kernel takes the inputs.
    """
    q_BHqD, k_BKkD, v_BKkD = _dense(q_BHqD), _dense(k_BKkD), _dense(v_BKkD)
    kind = _kernel(q_BHqD, v_BKkD, mask)
    if kind == "cpu":
        bias = None if mask is None else _bias(mask, q_BHqD.dtype)
        out, lse = _cpu(q_BHqD, k_BKkD, v_BKkD, 0.0, causal, attn_mask=bias, scale=scale)
    elif kind == "flash":
        size = q_BHqD.shape[-1]
        q_BHqD, k_BKkD, v_BKkD = (_padded(x, _HEAD_MULTIPLE) for x in (q_BHqD, k_BKkD, v_BKkD))
        out, lse, *_ = _flash(q_BHqD, k_BKkD, v_BKkD, 0.0, causal, False, scale=scale)
        out = out[..., :size]
    else:
        groups = q_BHqD.shape[1] // k_BKkD.shape[1]
        bias = _aligned_bias(mask, q_BHqD)
        out, lse, *_ = _efficient(
            q_BHqD, _repeated(k_BKkD, groups), _repeated(v_BKkD, groups), bias, True, 0.0, causal, scale=scale
        )
        lse = lse[..., : q_BHqD.shape[2]]
    if mask is not None:
        # The kernels give a query that sees nothing an output of 0, and as log-sum-exp something finite.
        lse = lse.masked_fill(~mask.any(-1), -_INF)
    return out, lse


def backward(
    grad_BHqD: Tensor,
    q_BHqD: Tensor,
    k_BKkD: Tensor,
    v_BKkD: Tensor,
    out_BHqD: Tensor,
    lse_BHq: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    scale: float,
) -> Gradients:
    """What one part of the keys contributes to the gradients.

    Args:
        grad_BHqD: Gradient of the whole output.
        q_BHqD: Queries.
        k_BKkD: The keys of the part.
        v_BKkD: Its values.
        out_BHqD: The whole output, over all parts.
        lse_BHq: The whole log-sum-exp; +inf for queries that see nothing at all (see `blind`).
        causal: As in the forward.
        mask: As in the forward.
        scale: As in the forward.
    """
    grad_BHqD, q_BHqD, k_BKkD, v_BKkD, out_BHqD = map(_dense, (grad_BHqD, q_BHqD, k_BKkD, v_BKkD, out_BHqD))
    kind = _kernel(q_BHqD, v_BKkD, mask)
    if kind == "cpu":
        bias = None if mask is None else _bias(mask, q_BHqD.dtype)
        return Gradients(
            *_cpu_backward(
                grad_BHqD, q_BHqD, k_BKkD, v_BKkD, out_BHqD, lse_BHq, 0.0, causal, attn_mask=bias, scale=scale
            )
        )
    if kind == "flash":
        size, (queries, keys) = q_BHqD.shape[-1], (q_BHqD.shape[2], k_BKkD.shape[2])
        grad_BHqD, q_BHqD, k_BKkD, v_BKkD, out_BHqD = (
            _padded(x, _HEAD_MULTIPLE) for x in (grad_BHqD, q_BHqD, k_BKkD, v_BKkD, out_BHqD)
        )
        # Without dropout the state of the generator is not read.
        state = torch.empty(2, dtype=torch.uint64, device=q_BHqD.device)
        found = _flash_backward(
            grad_BHqD, q_BHqD, k_BKkD, v_BKkD, out_BHqD, lse_BHq.contiguous(), None, None, queries, keys, 0.0, causal,
            state, state, scale=scale,
        )  # fmt: skip
        return Gradients(*(x[..., :size] for x in found))
    groups = q_BHqD.shape[1] // k_BKkD.shape[1]
    missing = -lse_BHq.shape[-1] % _LSE_MULTIPLE
    lse_BHq = F.pad(lse_BHq, (0, missing), value=_INF) if missing else lse_BHq.contiguous()
    seed = torch.empty((), dtype=torch.int64, device=q_BHqD.device)
    dq, dk, dv, _ = _efficient_backward(
        grad_BHqD, q_BHqD, _repeated(k_BKkD, groups), _repeated(v_BKkD, groups), _aligned_bias(mask, q_BHqD), out_BHqD,
        lse_BHq, seed, seed, 0.0, [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    return Gradients(dq, _group_sum(dk, groups), _group_sum(dv, groups))


def blind(lse_BHq: Tensor) -> Tensor:
    """The log-sum-exp for `backward`: queries that see nothing get +inf, with which all their probabilities are 0."""
    return lse_BHq.masked_fill(lse_BHq == -_INF, _INF)


def in_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Casts inputs as autocast, where it is on, casts those of `torch.nn.functional.scaled_dot_product_attention`."""
    device = q.device.type
    if not torch.is_autocast_enabled(device) or q.dtype == torch.float64:
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def same_head_size(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values of another head size than that of queries and keys, which no kernel takes, are made equal by zeros.

    The output has zeros where the values have them; the scale has to be that of the true head size.
    """
    missing = q.shape[-1] - v.shape[-1]
    if missing > 0:
        return q, k, F.pad(v, (0, missing))
    return (F.pad(q, (0, -missing)), F.pad(k, (0, -missing)), v) if missing else (q, k, v)


def _kernel(q: Tensor, v: Tensor, mask: Tensor | None) -> str:
    """The kernel that takes the inputs: ``"cpu"``, ``"flash"`` or ``"efficient"``."""
    kind, dtype, size = q.device.type, q.dtype, q.shape[-1]
    if v.shape[-1] != size:
        raise ValueError(f"The values' head size {v.shape[-1]} is not the queries' {size}: see `same_head_size`.")
    if kind == "cpu" and dtype in _CPU_TYPES:
        return "cpu"
    if kind == "cuda" and dtype in _HALF and mask is None and size <= _FLASH_HEAD:
        return "flash"
    if kind == "cuda" and (dtype in _HALF or dtype == torch.float32):
        if size % _HEAD_MULTIPLE:
            raise ValueError(
                f"Efficient attention, which {dtype} with{'' if mask is None else ' a mask'} needs on CUDA, takes no head size of {size};"
                f" one of {-(-size // _HEAD_MULTIPLE) * _HEAD_MULTIPLE} it takes."
            )
        return "efficient"
    raise ValueError(
        f"No attention kernel with log-sum-exp takes {dtype} on {kind}. There are some for fp64, fp32, bf16 and fp16 on CPU, and for"
        " fp32, bf16 and fp16 on CUDA."
    )


def _dense(x: Tensor) -> Tensor:
    # The kernels compute nonsense, without a word, where a head's numbers are not side by side (checked with 2.13).
    return x if x.stride(-1) == 1 else x.contiguous()


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -_INF)


def _aligned_bias(mask: Tensor | None, q_BHqD: Tensor) -> Tensor | None:
    if mask is None:
        return None
    keys = mask.shape[-1]
    bias = _padded(_bias(mask, q_BHqD.dtype), _BIAS_MULTIPLE)[..., :keys]
    return bias.expand(q_BHqD.shape[0], q_BHqD.shape[1], -1, -1)


def _padded(x: Tensor, multiple: int) -> Tensor:
    missing = -x.shape[-1] % multiple
    return F.pad(x, (0, missing)) if missing else x


def _repeated(x_BKkD: Tensor, groups: int) -> Tensor:
    return x_BKkD if groups == 1 else x_BKkD.repeat_interleave(groups, 1)


def _group_sum(x_BHkD: Tensor, groups: int) -> Tensor:
    if groups == 1:
        return x_BHkD
    # 16-bit kernels add up in fp32 inside of torch's sum.
    batch, heads, keys, size = x_BHkD.shape
    return x_BHkD.reshape(batch, heads // groups, groups, keys, size).sum(2)

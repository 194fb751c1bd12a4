"""Attention of one process with its mask written out, and what an attention of several ranks has to equal."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_5d.context_parallel.attention import ContextAttention
from lightning_5d.context_parallel.cut import SequenceCut
from lightning_5d.context_parallel.masks import AttentionMask
from lightning_5d.context_parallel.transports import Collectives

SIZES = [(2, "shared memory"), (4, "shared memory"), (2, "sends"), (4, "sends"), (2, "collectives")]
"""Ranks, and how they exchange what they need of each other."""
MASKS = ["full", "causal", "window", "window of both sides", "keys", "causal keys", "documents", "everything"]


def opened(method: ModuleType, attention: Any, kind: str) -> Any:
    """An attention over all ranks that exchanges in one of the ways of `SIZES`; `method` is the module that it opens its transport in."""
    group, cpu = dist.group.WORLD, torch.device("cpu")
    if kind != "collectives":
        return attention(group, cpu, shared_memory=kind == "shared memory")
    # As on a device, whose collectives gloo has as well.
    with mock.patch.object(method, "open_transport", return_value=Collectives(group, cpu)):
        return attention(group, cpu)


@dataclass(frozen=True)
class Case:
    """One call: queries and keys of `heads` and `kv` heads, of 2 sequences of `length` tokens."""

    mask: str
    length: int
    heads: int = 4
    kv: int = 4
    size: int = 8
    dtype: torch.dtype = torch.float32
    times: float = 1.0

    def inputs(self) -> list[Tensor]:
        """Queries, keys, values and the gradient of the outputs."""
        generator = torch.Generator().manual_seed(self.length)
        counts = (self.heads, self.kv, self.kv, self.heads)
        made = [torch.randn(2, n, self.length, self.size, generator=generator).to(self.dtype) for n in counts]
        return [made[0] * self.times, made[1] * self.times, *made[2:]]

    def attention_mask(self) -> AttentionMask:
        """What queries see."""
        generator = torch.Generator().manual_seed(1)
        keys = torch.rand(2, self.length, generator=generator) < 0.7
        keys[1, self.length // 2 :] = False
        keys[0, 0] = False  # with causality the first query sees nothing
        documents = (torch.rand(2, self.length, generator=generator) < 0.15).cumsum(1)
        return {
            "full": AttentionMask(),
            "causal": AttentionMask(causal=True),
            "window": AttentionMask(causal=True, window=5),
            "window of both sides": AttentionMask(window=4),
            "keys": AttentionMask(keys=keys[:1]),
            "causal keys": AttentionMask(causal=True, keys=keys),
            "documents": AttentionMask(causal=True, documents=documents),
            "everything": AttentionMask(causal=True, window=7, keys=keys, documents=documents[:1]),
        }[self.mask]


def dense(mask: AttentionMask, length: int) -> Tensor:
    """(B or 1, 1, S, S), from the words of `AttentionMask`."""
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = (j <= i)[None] if mask.causal else torch.ones(1, length, length, dtype=torch.bool)
    if mask.window is not None:
        seen = seen & ((i - j).abs() < mask.window)
    if mask.keys is not None:
        seen = seen & mask.keys[:, None]
    if mask.documents is not None:
        seen = seen & (mask.documents[:, :, None] == mask.documents[:, None])
    return seen[:, None]


def of_one_process(case: Case, dtype: torch.dtype, scale: float | None = None) -> list[Tensor]:
    """Outputs and the gradients of queries, keys and values, computed in a dtype."""
    q, k, v, g = (x.to(dtype) for x in case.inputs())
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    seen = dense(case.attention_mask(), case.length)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), g)]


def of_a_rank(
    attention: ContextAttention, case: Case, cut: SequenceCut, rank: int, scale: float | None = None
) -> list[Tensor]:
    """What this rank has of the same, from inputs laid out as projections make them; padding is not zero."""

    def part(x: Tensor, fill: float) -> Tensor:
        return cut.part(x, 2, rank, fill).transpose(1, 2).contiguous().transpose(1, 2)

    q, k, v = (part(x, 3.0).requires_grad_() for x in case.inputs()[:3])
    out = attention(q, k, v, case.attention_mask(), cut, scale)
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), part(case.inputs()[3], 0.0))]


def differences(found: Sequence[Tensor], case: Case, cut: SequenceCut, rank: int) -> list[float]:
    """The largest error of each, relative to the largest number, against fp64."""
    errors = []
    for mine, whole in zip(found, of_one_process(case, torch.float64), strict=True):
        want = cut.part(whole, 2, rank)
        held = torch.cat([torch.arange(a, b) for a, b in cut.spans(rank)]) < cut.length
        assert mine.isfinite().all()
        errors.append(float((mine.double() - want)[:, :, held].abs().max() / whole.abs().max()) if held.any() else 0.0)
    return errors

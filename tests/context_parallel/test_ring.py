"""Ring attention is attention in one process, whoever holds which tokens, and no rank holds the keys of all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_5d.context_parallel.cut import SequenceCut
from lightning_5d.context_parallel.exchange import GroupExchange
from lightning_5d.context_parallel.host_exchange import HostExchange
from lightning_5d.context_parallel.masks import AttentionMask
from lightning_5d.context_parallel.ring import RingAttention
from tests.ranks.pool import RankPool

KINDS = ["shared memory", "gloo"]
CPU = torch.device("cpu")
B, H, K, D = 2, 4, 2, 8


def open_ring(kind: str) -> RingAttention:
    ring = RingAttention(dist.group.WORLD, CPU, shared_memory=kind == "shared memory")  # type: ignore[arg-type]
    assert type(ring.exchange) is (HostExchange if kind == "shared memory" else GroupExchange)
    return ring


def inputs(length: int, dtype: torch.dtype = torch.float32, kv_heads: int = K, times: float = 1.0) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output, all whole."""
    random = torch.Generator().manual_seed(length)
    shapes = [(B, H, length, D), (B, kv_heads, length, D), (B, kv_heads, length, D), (B, H, length, D)]
    q, k, v, grad = (torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes)
    return [x.to(dtype) for x in (q * times, k * times, v, grad)]


def seen(mask: AttentionMask, length: int) -> Tensor:
    """The pairs that count, written once more and without any cleverness, (B|1, 1, S, S)."""
    pairs = torch.ones(B, 1, length, length, dtype=torch.bool)
    for b in range(B):
        for i in range(length):
            for j in range(length):
                ok = not (mask.causal and j > i)
                ok = ok and (mask.window is None or abs(i - j) < mask.window)
                ok = ok and (mask.keys is None or bool(mask.keys[b % len(mask.keys), j]))
                if mask.documents is not None:
                    row = mask.documents[b % len(mask.documents)]
                    ok = ok and int(row[i]) == int(row[j])
                pairs[b, 0, i, j] = ok
    return pairs


def one_process(whole: list[Tensor], mask: AttentionMask, scale: float | None = None) -> tuple[Tensor, ...]:
    """The output and the three gradients of torch's own attention."""
    q, k, v, grad = whole
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    pairs = seen(mask, q.shape[2])
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=pairs.expand(B, H, -1, -1), enable_gqa=q.shape[1] != k.shape[1], scale=scale
    )
    out = out.masked_fill(~pairs.any(-1, keepdim=True), 0.0)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))


def on_ring(
    ring: RingAttention, whole: list[Tensor], mask: AttentionMask, cut: SequenceCut, scale: float | None = None
) -> tuple[Tensor, ...]:
    """The same, of the ranks' parts, put together again."""
    rank = ring.exchange.rank
    q, k, v, grad = (cut.part(x, 2, rank) for x in whole)
    # As projections make them: heads inside of tokens.
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v))
    out = ring(q, k, v, mask, cut, scale)
    assert out.dtype == q.dtype
    found = (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))
    whole_again = []
    for part in found:
        parts = [torch.empty(0)] * dist.get_world_size()
        dist.all_gather_object(parts, part)
        whole_again.append(cut.join(parts, 2))
    return tuple(whole_again)


def masks(length: int) -> dict[str, AttentionMask]:
    documents = torch.tensor([[0] * 3 + [1] * (length - 7) + [2] * 4, [5] * (length - 2) + [1] * 2])
    scattered = torch.arange(length)[None] % 3
    keys = torch.ones(B, length, dtype=torch.bool)
    keys[0, -3:] = False
    keys[1, :2] = False
    return {
        "causal": AttentionMask(causal=True),
        "full": AttentionMask(),
        "window": AttentionMask(causal=True, window=4),
        "window of both sides": AttentionMask(window=3),
        "keys": AttentionMask(keys=keys),
        "causal keys": AttentionMask(causal=True, keys=keys),
        "documents": AttentionMask(documents=documents),
        "causal documents": AttentionMask(causal=True, documents=documents),
        "scattered documents": AttentionMask(causal=True, documents=scattered),
        "all": AttentionMask(causal=True, window=5, keys=keys, documents=documents),
        "nothing": AttentionMask(keys=torch.zeros(1, length, dtype=torch.bool)),
    }


def close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float, what: str) -> None:
    for name, a, b in zip(("output", "dq", "dk", "dv"), found, expected, strict=True):
        torch.testing.assert_close(
            a, b, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{what}: {name}: {m}"
        )


def _parity(rank: int, kind: str, size: int) -> None:
    ring = open_ring(kind)
    for length in (32, 29, 17):
        whole = inputs(length)
        for name, mask in masks(length).items():
            expected = one_process(whole, mask)
            for balance in ("zigzag", "contiguous"):
                cut = SequenceCut(length, size, balance)  # type: ignore[arg-type]
                close(on_ring(ring, whole, mask, cut), expected, 1e-5, f"{name}, {balance}, {length}")
    ring.close()


@pytest.mark.parametrize(("kind", "size"), [("shared memory", 2), ("shared memory", 4), ("gloo", 2), ("gloo", 4)])
def test_a_ring_is_attention_in_one_process(ranks: RankPool, kind: str, size: int) -> None:
    ranks(size, _parity, kind, size, timeout=50, backend="gloo")

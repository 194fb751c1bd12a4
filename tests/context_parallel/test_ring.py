"""Ring attention is attention in one process, whoever holds which tokens, and no rank holds the keys of all."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_5d.context_parallel import kernels
from lightning_5d.context_parallel.cut import SequenceCut
from lightning_5d.context_parallel.exchange import GroupExchange
from lightning_5d.context_parallel.host_exchange import HostExchange
from lightning_5d.context_parallel.masks import AttentionMask
from lightning_5d.context_parallel.ring import RingAttention
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.ranks.words import hear, say

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
    """The pairs that count, (B|1, 1, S, S), all at once."""
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    pairs = torch.ones(1, length, length, dtype=torch.bool)
    if mask.causal:
        pairs = pairs & (j <= i)
    if mask.window is not None:
        pairs = pairs & ((i - j).abs() < mask.window)
    if mask.keys is not None:
        pairs = pairs & mask.keys[:, None]
    if mask.documents is not None:
        pairs = pairs & (mask.documents[:, :, None] == mask.documents[:, None])
    return pairs[:, None]


def one_process(whole: list[Tensor], mask: AttentionMask, scale: float | None = None) -> tuple[Tensor, ...]:
    """The output and the three gradients of torch's own attention."""
    q, k, v, grad = whole
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    pairs = seen(mask, q.shape[2])
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=pairs.expand(len(q), H, -1, -1), enable_gqa=q.shape[1] != k.shape[1], scale=scale
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
    for length in (32, 29):
        whole = inputs(length)
        for name, mask in masks(length).items():
            expected = one_process(whole, mask)
            for balance in ("zigzag", "contiguous"):
                cut = SequenceCut(length, size, balance)  # type: ignore[arg-type]
                close(on_ring(ring, whole, mask, cut), expected, 1e-5, f"{name}, {balance}, {length}")
    ring.close()


@pytest.mark.parametrize(("kind", "size"), [("shared memory", 2), ("shared memory", 4), ("gloo", 2), ("gloo", 3)])
def test_a_ring_is_attention_in_one_process(ranks: RankPool, kind: str, size: int) -> None:
    ranks(size, _parity, kind, size, timeout=50, backend="gloo")


def _shapes(rank: int, kind: str) -> None:
    ring = open_ring(kind)
    causal, cut = AttentionMask(causal=True), SequenceCut(13, 2)
    for heads in (1, 2, 4):
        whole = inputs(13, torch.float64, kv_heads=heads)
        close(on_ring(ring, whole, causal, cut), one_process(whole, causal), 1e-12, f"{heads} key heads")
    close(on_ring(ring, whole, causal, cut, 0.3), one_process(whole, causal, 0.3), 1e-12, "scale")
    q, k, v, grad = whole
    for size in (3, 12):
        other = [q, k, torch.cat([v, v], -1)[..., :size], torch.cat([grad, grad], -1)[..., :size]]
        close(on_ring(ring, other, causal, cut), one_process(other, causal), 1e-12, f"values of size {size}")
    alone = [x[:1] for x in whole]
    close(on_ring(ring, alone, AttentionMask(), SequenceCut(13, 2)), one_process(alone, AttentionMask()), 1e-12, "one")
    nobody = [cut.part(x[:0], 2, rank).requires_grad_() for x in whole[:3]]
    out = ring(*nobody, causal, cut)  # type: ignore[misc]
    assert out.shape == (0, H, 8, D)
    out.sum().backward()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in nobody)
    with torch.no_grad():
        own = [cut.part(x, 2, rank) for x in whole[:3]]
        assert ring(*own, causal, cut).grad_fn is None  # type: ignore[misc]
    with torch.autocast("cpu", torch.bfloat16):
        found = ring(own[0].float(), own[1].float(), own[2].bfloat16(), causal, cut)
        assert found.dtype == torch.bfloat16
    frozen = [own[0].clone().requires_grad_(), *own[1:]]
    ring(*frozen, causal, cut).sum().backward()  # type: ignore[misc]
    assert frozen[0].grad is not None
    ring.close()


@pytest.mark.parametrize("kind", KINDS)
def test_heads_scales_and_sizes(ranks: RankPool, kind: str) -> None:
    ranks(2, _shapes, kind, timeout=30, backend="gloo")


def _refusals(rank: int) -> None:
    ring = open_ring("shared memory")
    q, k, v, _ = inputs(8)
    with pytest.raises(ValueError, match="cut for 4 ranks; attention is over 2"):
        ring(q, k, v, AttentionMask(), SequenceCut(32, 4))
    with pytest.raises(ValueError, match="have 8, 5 and 5 tokens; each rank holds 8 of a"):
        ring(q, k[:, :, :5], v[:, :, :5], AttentionMask(), SequenceCut(15, 2))
    with pytest.raises(ValueError, match="do not fit keys"):
        ring(q[:, :3], k, v, AttentionMask(), SequenceCut(16, 2))
    ring.close()


def test_what_does_not_fit_is_refused_with_both_numbers(ranks: RankPool) -> None:
    ranks(2, _refusals, timeout=20, backend="gloo")


def _errors(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


def _half(rank: int, kind: str, size: int) -> None:
    ring = open_ring(kind)
    for dtype in (torch.bfloat16, torch.float16):
        for times in (1.0, 30.0):
            whole = inputs(96, dtype, times=times)
            for mask in (AttentionMask(causal=True), AttentionMask()):
                exact = one_process([x.double() for x in whole], mask)
                alone = _errors(one_process(whole, mask), exact)
                found = on_ring(ring, whole, mask, SequenceCut(96, size))
                assert all(x.isfinite().all() for x in found)
                for name, mine, theirs in zip(("output", "dq", "dk", "dv"), _errors(found, exact), alone, strict=True):
                    assert mine <= 2 * theirs + 1e-3, f"{name} of {dtype} times {times}: {mine} against {theirs}"
    ring.close()


@pytest.mark.parametrize("kind", KINDS)
def test_large_scores_stay_finite_and_16_bits_are_joined_in_32(ranks: RankPool, kind: str) -> None:
    ranks(4, _half, kind, 4, timeout=40, backend="gloo")


def _traffic(rank: int, kind: str, causal: bool, balance: str, window: int | None) -> tuple[int, int, int, int]:
    ring, size = open_ring(kind), dist.get_world_size()
    cut = SequenceCut(64, size, balance)  # type: ignore[arg-type]
    whole = inputs(64)
    q, k, v, grad = (cut.part(x, 2, rank).requires_grad_() for x in whole)
    out = ring(q, k, v, AttentionMask(causal, window), cut)
    traffic = ring.traffic
    forward = traffic.bytes.get("send", 0), traffic.calls.get("send", 0)
    out.backward(grad)
    dist.barrier()
    ring.close()
    return (*forward, traffic.bytes.get("send", 0) - forward[0], traffic.volume)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("causal", "balance"), [(True, "zigzag"), (True, "contiguous"), (False, "contiguous")])
def test_traffic_is_what_queries_see_and_no_more(ranks: RankPool, kind: str, causal: bool, balance: str) -> None:
    block = 2 * B * K * 16 * D * 4  # keys and values of one of 4 ranks, in fp32
    for r, (sent, calls, back, volume) in enumerate(ranks(4, _traffic, kind, causal, balance, None, timeout=20)):
        later = 3 - r
        if not causal:
            out, home = 3 * block, 3 * block
        elif balance == "contiguous":
            out, home = later * block, r * block
        else:
            out, home = r * block + later * block // 2, later * block + r * block // 2
        assert sent == out
        assert calls == (later if causal and balance == "contiguous" else 3)
        assert back == home + (out if kind == "gloo" else 0)
        assert volume == sent + back


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_needs_no_more_than_its_neighbours_tail(ranks: RankPool, kind: str) -> None:
    token = 2 * B * K * D * 4
    sent = [each[0] for each in ranks(4, _traffic, kind, True, "contiguous", 5, timeout=20)]
    assert sent == [4 * token, 4 * token, 4 * token, 0]


def _held(rank: int, kind: str, length: int) -> tuple[int, int]:
    ring, size = open_ring(kind), dist.get_world_size()
    cut = SequenceCut(length, size)
    q, k, v, grad = (cut.part(x, 2, rank).requires_grad_() for x in inputs(length))
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = ring(q, k, v, AttentionMask(), cut)
    others = {x.data_ptr() for x in ring.mapped()}
    own = sum(nbytes for address, nbytes in kept.items() if address not in others)
    out.backward(grad)
    dist.barrier()
    return own, sum(x.nbytes for x in ring.memory())


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_rank_keeps_grows_with_its_part_and_not_with_the_sequence(ranks: RankPool, kind: str) -> None:
    # Twice the sequence on twice the ranks: the same part, of which q, out and lse are kept, and own keys and values once.
    part = B * 64 * D * 4
    expected = 2 * H * part + B * H * 64 * 4 + 2 * K * part
    for size in (2, 4):
        for own, memory in ranks(size, _held, kind, 64 * size, timeout=20, backend="gloo"):
            assert own <= expected
            # Own block, and gradients for two others on their way home: whole pages each.
            assert memory <= (3 * (2 * K * part + 4096) if kind == "shared memory" else 0)


def _order(rank: int) -> list[str]:
    ring = open_ring("gloo")
    size = dist.get_world_size()
    log: list[str] = []
    exchange = ring.exchange
    assert isinstance(exchange, GroupExchange)
    swap, wait = exchange.swap, exchange.wait

    def logged_swap(to: int, data: Tensor | None, source: int, into: Tensor | None, tag: int) -> Any:
        log.append(f"{'gradient' if tag else 'block'} of {(rank - source) % size}" if tag == 0 else "gradients leave")
        return swap(to, data, source, into, tag)

    exchange.swap = logged_swap  # type: ignore[method-assign]
    forward, backward = kernels.forward, kernels.backward

    def logged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            log.append(name)
            return function(*args, **kwargs)

        return call

    assert wait is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "forward", logged("compute", forward))
        patch.setattr(kernels, "backward", logged("compute", backward))
        cut = SequenceCut(24, size)
        q, k, v, grad = (cut.part(x, 2, rank).requires_grad_() for x in inputs(24))
        out = ring(q, k, v, AttentionMask(), cut)
        log.append("-")
        out.backward(grad)
    ring.close()
    return log


def test_the_next_block_is_on_its_way_before_the_present_one_is_computed(ranks: RankPool) -> None:
    for log in ranks(3, _order, timeout=20, backend="gloo"):
        assert " ".join(log) == (
            "block of 1 compute block of 2 compute compute - "
            "block of 1 compute block of 2 compute gradients leave compute gradients leave"
        )


BLOCKS = 2


def _late(rank: int) -> int:
    """A rank that begins its backward late holds up nobody's computing with its keys."""
    ring = open_ring("shared memory")
    cut = SequenceCut(32, 2)
    q, k, v, grad = (cut.part(x, 2, rank).requires_grad_() for x in inputs(32))
    out = ring(q, k, v, AttentionMask(causal=True), cut)
    dist.barrier()
    computed = 0
    backward = kernels.backward

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal computed
        result = backward(*args, **kwargs)
        computed += 1
        if rank == 0 and computed == BLOCKS:
            say("computed")
        return result

    if rank:
        hear("computed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "backward", counted)
        out.backward(grad)
    ring.close()
    return computed


def test_blocks_are_there_in_the_backward_before_their_owner_begins_it(ranks: RankPool) -> None:
    assert ranks(2, _late, backend="gloo") == [BLOCKS, BLOCKS]


def _dies(rank: int, kind: str, before: float) -> None:
    ring = open_ring(kind)
    cut = SequenceCut(32, 3)
    q, k, v, grad = (cut.part(x, 2, rank).requires_grad_() for x in inputs(32))
    out = ring(q, k, v, AttentionMask(), cut)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(before)
    begin = time.monotonic()

    def go_on() -> None:
        out.backward(grad)
        ring(q, k, v, AttentionMask(), cut)

    with pytest.raises(RuntimeError, match="gone"):
        go_on()
    assert time.monotonic() - begin < 30
    raise RuntimeError("as expected")


@pytest.mark.parametrize("before", [0.0, 0.5], ids=["just now", "long ago"])
@pytest.mark.parametrize("kind", KINDS)
def test_nobody_waits_for_the_dead(ranks: RankPool, kind: str, before: float) -> None:
    with pytest.raises(
        RankError, match=r"rank 0: RuntimeError: as expected\nrank 1: was killed by SIGKILL\nrank 2: .*as expected"
    ):
        ranks(3, _dies, kind, before, timeout=30, backend="gloo")

"""Context parallelism as one writes it into a decoder by hand: a sequence in zigzag order, its keys and values gathered or sent round a ring.

Shape suffixes as in `decoder`: B batch, N query heads, G key and value heads, H head size; L for this rank's tokens, and S for those of a
whole sequence. Each rank holds chunks r and 2c-1-r of 2c.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contestants import LEARNING_RATE
from benchmarks.decoder import Decoder, Size

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def zigzag(tokens: int, rank: int, ranks: int) -> Tensor:
    """Positions that a rank holds."""
    width = tokens // (2 * ranks)
    return torch.cat([torch.arange(chunk * width, (chunk + 1) * width) for chunk in (rank, 2 * ranks - 1 - rank)])


def trained(size: Size, attend: Attend, positions_L: Tensor, wrap: Callable[[nn.Module], nn.Module]) -> Any:
    """A step of the decoder on the tokens at these positions, whose attention is `attend`."""
    torch.manual_seed(0)
    decoder = Decoder(size)
    for name in ("cos", "sin"):
        own_LH = getattr(decoder, name)[positions_L]
        delattr(decoder, name)  # DDP would make buffers the same on all ranks
        setattr(decoder, name, own_LH)
    for layer in decoder.layers:
        layer.attention.mix = attend  # type: ignore[union-attr]
    module = wrap(decoder)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)

    def step(tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        loss: Tensor = module(tokens_BS[:, positions_L], targets_BS[:, positions_L])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _ddp(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)


def alone(size: Size) -> Any:
    """A rank's work without the other: nothing is exchanged, and the other's keys and values are stood in for by its own.

    Of two ranks rank 1 attends from its first chunk to one chunk before it and to itself, from its second to two before it and to
    itself; rank 0 to as many pairs. Each is one call of the kernel, as few as there can be; their sum stands in for the join.
    """

    def attend(q_BNLH: Tensor, k_BGLH: Tensor, v_BGLH: Tensor) -> Tensor:
        (q1, q2), (k1, k2), (v1, v2) = (x.chunk(2, 2) for x in (q_BNLH, k_BGLH, v_BGLH))
        first = _sdpa(q1, k1, v1, False) + _sdpa(q1, k1, v1, True)
        return torch.cat((first, _sdpa(q2, k_BGLH, v_BGLH, False) + _sdpa(q2, k2, v2, True)), 2)

    return trained(size, attend, zigzag(size.tokens, 1, 2), lambda module: module)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def gathered(size: Size) -> Any:
    """Keys and values of all ranks gathered, masked attention of each chunk to what is before it, DDP."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    width = size.tokens // (2 * ranks)
    order_S = torch.cat([zigzag(size.tokens, other, ranks) for other in range(ranks)]).argsort()
    masks = {
        chunk: torch.ones(width, (chunk + 1) * width, dtype=torch.bool).tril(chunk * width)
        for chunk in (rank, 2 * ranks - 1 - rank)
    }

    def attend(q_BNLH: Tensor, k_BGLH: Tensor, v_BGLH: Tensor) -> Tensor:
        k_BGSH, v_BGSH = _Gather.apply(torch.stack((k_BGLH, v_BGLH)), order_S)
        out = []
        for q_BNWH, (chunk, mask_WS) in zip(q_BNLH.chunk(2, 2), masks.items(), strict=True):
            seen = (chunk + 1) * width
            k, v = k_BGSH[:, :, :seen], v_BGSH[:, :, :seen]
            out.append(F.scaled_dot_product_attention(q_BNWH, k, v, attn_mask=mask_WS, enable_gqa=True))
        return torch.cat(out, 2)

    return trained(size, attend, zigzag(size.tokens, rank, ranks), _ddp)


def attention_of(method: Any, **options: Any) -> Callable[[Size], Any]:
    """This package's attention in the same loop: what is left of a strategy without doors and ZeRO."""

    def make(size: Size) -> Any:
        from lightning_5d.context_parallel.attention import open_attention
        from lightning_5d.context_parallel.context import ContextParallel
        from lightning_5d.context_parallel.masks import AttentionMask
        from lightning_5d.mesh import AXES, ParallelMesh

        ranks = dist.get_world_size()
        plugin = ContextParallel(ranks, method=method, **options)
        mesh = ParallelMesh.create(dict.fromkeys(AXES, 1) | {"cp": ranks}, "cpu")
        attention, mask, cut = (
            open_attention(method, plugin.ulysses, mesh),
            AttentionMask(True),
            plugin.cut(size.tokens),
        )
        positions_L = cut.positions(dist.get_rank())
        return trained(size, lambda q, k, v: attention(q, k, v, mask, cut), positions_L, _ddp)

    return make


class _Gather(torch.autograd.Function):
    """Forward: all-gather along the sequence, in the order of positions. Backward: reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x_2BGLH: Tensor, order_S: Tensor) -> Tensor:
        ctx.order_S = order_S
        x_L2BGH = x_2BGLH.permute(3, 0, 1, 2, 4).contiguous()
        x_S2BGH = x_L2BGH.new_empty(len(order_S), *x_L2BGH.shape[1:])
        dist.all_gather_single(x_S2BGH, x_L2BGH)
        return x_S2BGH[order_S].permute(1, 2, 3, 0, 4)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        g_S2BGH = grads[0].permute(3, 0, 1, 2, 4)[ctx.order_S.argsort()].contiguous()
        g_L2BGH = g_S2BGH.new_empty(len(g_S2BGH) // dist.get_world_size(), *g_S2BGH.shape[1:])
        dist.reduce_scatter_single(g_L2BGH, g_S2BGH)
        return g_L2BGH.permute(1, 2, 3, 0, 4), None


def ring(size: Size) -> Any:
    """The zigzag ring of zhuzilin's ring-flash-attention, DDP."""
    attend: Attend = _Ring.apply  # type: ignore[assignment]
    return trained(size, attend, zigzag(size.tokens, dist.get_rank(), dist.get_world_size()), _ddp)


class _Ring(torch.autograd.Function):
    """Zigzag ring attention, step by step as published, on ATen's flash kernel for CPU and gloo's point to point.

    In step 0 a rank attends to its own keys, causally; in step s to those of rank r - s: with all queries to their first half if
    s <= r, else with its second half to all of them. The next keys and values are under way meanwhile. In backward their gradients
    travel along behind them, in fp32, and arrive at home after as many steps as there are ranks.

    Source: https://github.com/zhuzilin/ring-flash-attention, ``zigzag_ring_flash_attn.py``, which calls flash-attn on CUDA and NCCL; own
    code, in its order of exchanges and calls.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        rank, ranks, half = dist.get_rank(), dist.get_world_size(), q.shape[2] // 2
        k, v = k.contiguous(), v.contiguous()
        own = k, v
        for step in range(ranks):
            coming, works = _send_on([k, v]) if step + 1 < ranks else ([], [])
            if step == 0:
                out, lse = _flash(q, k, v, 0.0, True)
                out = out.float()
            elif step <= rank:
                _join(out, lse, *_flash(q, k[:, :, :half], v[:, :, :half], 0.0, False))
            else:
                _join(out[:, :, half:], lse[:, :, half:], *_flash(q[:, :, half:], k, v, 0.0, False))
            for work in works:
                work.wait()
            k, v = coming or (k, v)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, *own, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        rank, ranks, half, g = dist.get_rank(), dist.get_world_size(), q.shape[2] // 2, grads[0].contiguous()
        late = [x[:, :, half:].contiguous() for x in (g, q, out, lse)]
        travelling: list[Tensor] = []
        on_their_way: list[Any] = []
        for step in range(ranks):
            coming, works = _send_on([k, v]) if step + 1 < ranks else ([], [])
            if step == 0:
                dq, dk, dv = _flash_backward(g, q, k, v, out, lse, 0.0, True)
                dq, gradients = dq.float(), [x.float().contiguous() for x in (dk, dv)]
            else:
                if step <= rank:
                    block, to = _flash_backward(g, q, k[:, :, :half], v[:, :, :half], out, lse, 0.0, False), slice(half)
                    dq += block[0]
                else:
                    block, to = _flash_backward(late[0], late[1], k, v, late[2], late[3], 0.0, False), slice(None)
                    dq[:, :, half:] += block[0]
                for work in on_their_way:
                    work.wait()
                gradients = travelling
                for whole, part in zip(gradients, block[1:], strict=True):
                    whole[:, :, to] += part
            for work in works:
                work.wait()
            k, v = coming or (k, v)
            travelling, on_their_way = _send_on(gradients)
        for work in on_their_way:
            work.wait()
        return dq.to(q.dtype), *(x.to(q.dtype) for x in travelling)  # type: ignore[return-value]


def _send_on(tensors: list[Tensor]) -> tuple[list[Tensor], list[Any]]:
    """Starts sending tensors to the next rank and receiving as many from the one before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = [torch.empty_like(tensor) for tensor in tensors]
    exchanges = []
    for tensor, place in zip(tensors, received, strict=True):
        exchanges.append(dist.P2POp(dist.isend, tensor, (rank + 1) % ranks))
        exchanges.append(dist.P2POp(dist.irecv, place, (rank - 1) % ranks))
    return received, dist.batch_isend_irecv(exchanges)


def _join(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Adds attention to more keys, in place."""
    both = torch.logaddexp(lse, more_lse)
    out.mul_((lse - both).exp_()[..., None]).add_(more * (more_lse - both).exp_()[..., None])
    lse.copy_(both)

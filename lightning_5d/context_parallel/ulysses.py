"""Ulysses: each rank computes whole sequences, of its share of the heads.

One exchange gives every rank all tokens of its heads' queries, keys and values, attention is that of one process, and a second exchange
gives every rank all heads of its tokens.

Source: Jacobs et al., "DeepSpeed Ulysses" (2023).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from typing_extensions import override

from lightning_5d.context_parallel.attention import ContextAttention, default_scale
from lightning_5d.context_parallel.cut import SequenceCut
from lightning_5d.context_parallel.head_exchange import HeadExchange, Spans
from lightning_5d.context_parallel.heads import Heads, heads_problem, kv_heads, query_heads
from lightning_5d.context_parallel.inputs import check_inputs
from lightning_5d.context_parallel.kernels import same_head_size
from lightning_5d.context_parallel.local import attend
from lightning_5d.context_parallel.masks import AttentionMask
from lightning_5d.context_parallel.transports import open_transport
from lightning_5d.data_parallel.traffic import Traffic


class SharedHeads:
    """Heads shared by neighbouring ranks, with a graph in both directions; all of them call it alike.

    Args:
        group: The ranks.
        device: Where their tensors are.
        traffic: Where to count what is sent.
        shared_memory: CPU ranks of one host read straight from each other's memory.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, traffic: Traffic, *, shared_memory: bool = True
    ) -> None:
        self.size = group.size()
        self._transport = open_transport(group, device, shared_memory=shared_memory)
        self._exchange = HeadExchange(self._transport, traffic)

    def take(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> tuple[Tensor, Tensor, Tensor]:
        """All tokens of this rank's heads.

        Args:
            q: (B, H, s, D).
            k: (B, K, s, D).
            v: (B, K, s, D).
            spans: For each rank the spans of its tokens in the result.

        Returns:
            (B, H/c, S, D) and twice (B, K', S, D), where K' are the key and value heads that this rank's queries need.

        Raises:
            ValueError: If the ranks cannot share the heads.
        """
        heads, kv = q.shape[1], k.shape[1]
        if (problem := heads_problem(heads, kv, self.size)) is not None:
            raise ValueError(str(problem))
        shared = kv_heads(heads, kv, self.size)
        taken: tuple[Tensor, Tensor, Tensor] = _ToHeads.apply(  # type: ignore[no-untyped-call]
            self._exchange, (query_heads(heads, self.size), shared, shared), spans, q, k, v
        )
        return taken

    def give_back(self, out: Tensor, spans: Spans) -> Tensor:
        """All heads of this rank's tokens: (B, H/c, S, D) becomes (B, H, s, D)."""
        heads = query_heads(out.shape[1] * self.size, self.size)
        given: Tensor = _ToTokens.apply(self._exchange, heads, spans, out)  # type: ignore[no-untyped-call]
        return given

    def memory(self) -> list[Tensor]:
        """See `ContextAttention.memory`."""
        return self._transport.memory()

    def mapped(self) -> list[Tensor]:
        """See `ContextAttention.mapped`."""
        return self._transport.mapped()

    def close(self) -> None:
        """See `ContextAttention.close`."""
        self._transport.close()


class UlyssesAttention(ContextAttention):
    """Attention whose heads the ranks share; any mask, any order of tokens.

    Args:
        group: The ranks.
        device: Where their tensors are.
        shared_memory: CPU ranks of one host read straight from each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, shared_memory: bool = True) -> None:
        self.traffic = Traffic()
        self._heads = SharedHeads(group, device, self.traffic, shared_memory=shared_memory)

    @override
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, cut: SequenceCut, scale: float | None = None
    ) -> Tensor:
        check_inputs(q, k, v, cut, self._heads.size)
        spans = [cut.spans(rank) for rank in range(cut.size)]
        # Padding is at the end of the order of positions.
        q, k, v = (x[:, :, : cut.length] for x in self._heads.take(q, k, v, spans))
        scale, size = default_scale(q.shape[-1], scale), v.shape[-1]
        out = attend(*same_head_size(q, k, v), mask, scale)[..., :size]
        if cut.padded > cut.length:
            out = F.pad(out, (0, 0, 0, cut.padded - cut.length))
        return self._heads.give_back(out, spans)

    @override
    def memory(self) -> Iterable[Tensor]:
        return self._heads.memory()

    @override
    def mapped(self) -> Iterable[Tensor]:
        return self._heads.mapped()

    @override
    def close(self) -> None:
        self._heads.close()


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, exchange: HeadExchange, heads: tuple[Heads, ...], spans: Spans, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.back = exchange, heads, [x.shape[1] for x in tensors], spans  # type: ignore[attr-defined]
        return tuple(exchange.to_heads(tensors, heads, spans))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        exchange, heads, totals, spans = ctx.back
        return None, None, None, *exchange.to_tokens(gradients, heads, totals, spans)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, exchange: HeadExchange, heads: Heads, spans: Spans, out: Tensor) -> Tensor:
        ctx.back = exchange, heads, spans  # type: ignore[attr-defined]
        (given,) = exchange.to_tokens([out], [heads], [sum(map(len, heads))], spans)
        return given

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        exchange, heads, spans = ctx.back
        return None, None, None, *exchange.to_heads([g], [heads], spans)

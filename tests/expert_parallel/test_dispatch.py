"""Tokens that go to experts on other ranks come back as one process would have them, and so do all gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_5d.expert_parallel.collective_exchange import CollectiveTokenExchange
from lightning_5d.expert_parallel.dispatch import Capacity, kept_by_capacity, through_experts
from lightning_5d.expert_parallel.exchange import TokenExchange, open_exchange
from lightning_5d.expert_parallel.grouped import grouped_linear
from lightning_5d.expert_parallel.host_exchange import HostTokenExchange
from tests.ranks.pool import RankPool

KINDS = ["shared memory", "gloo"]
EXPERTS, TOP_K, HIDDEN, INNER = 8, 2, 6, 5


def open_kind(kind: str) -> TokenExchange:
    exchange = open_exchange(dist.group.WORLD, shared_memory=kind == "shared memory")  # type: ignore[arg-type]
    assert type(exchange) is (HostTokenExchange if kind == "shared memory" else CollectiveTokenExchange)
    return exchange


@dataclass
class Batch:
    """Tokens of one rank, or of all, with a loss that is a weighted sum of what comes out."""

    hidden: Tensor
    index: Tensor
    weights: Tensor
    kept: Tensor | None
    of_out: Tensor

    def part(self, sizes: list[int], rank: int) -> "Batch":
        def cut(x: Tensor) -> Tensor:
            return x.split(sizes)[rank].detach().clone().requires_grad_(x.requires_grad)

        return Batch(
            cut(self.hidden),
            cut(self.index),
            cut(self.weights),
            None if self.kept is None else cut(self.kept),
            cut(self.of_out),
        )


def batch(tokens: int, choice: str, dtype: torch.dtype = torch.float32, limit: float | None = None) -> Batch:
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    if choice == "one":
        scores[:, 5] = 2.0
    index = scores.argsort(1, descending=True)[:, : 1 if choice == "one" else TOP_K]
    weights = torch.rand(index.shape, generator=generator)
    kept = None if limit is None else kept_by_capacity(index, weights, EXPERTS, Capacity(limit))
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    return Batch(
        hidden.requires_grad_(),
        index,
        weights.requires_grad_(),
        kept,
        torch.randn(tokens, HIDDEN, generator=generator).to(dtype),
    )


def matrices(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [
        (torch.randn(EXPERTS, *shape, generator=generator) * 0.5).to(dtype).requires_grad_()
        for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    ]


def experts_of(gate_up: Tensor, down: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    def compute(rows: Tensor, counts: Tensor) -> Tensor:
        gate, up = grouped_linear(rows, gate_up, counts).chunk(2, -1)
        return grouped_linear(torch.nn.functional.silu(gate) * up, down, counts)

    return compute


def by_loop(tokens: Batch, gate_up: Tensor, down: Tensor) -> Tensor:
    """One token after the other."""
    rows = []
    for n, x in enumerate(tokens.hidden):
        total = torch.zeros(HIDDEN)
        for k, expert in enumerate(tokens.index[n].tolist()):
            if tokens.kept is None or tokens.kept[n, k]:
                gate, up = (gate_up[expert] @ x).chunk(2)
                total = total + tokens.weights[n, k] * (down[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


def expected(tokens: Batch) -> dict[str, Tensor]:
    """What one process computes, in fp32."""
    whole = Batch(
        tokens.hidden.detach().float().requires_grad_(tokens.hidden.requires_grad),
        tokens.index,
        tokens.weights,
        tokens.kept,
        tokens.of_out.float(),
    )
    gate_up, down = (w.detach().float().requires_grad_() for w in matrices(tokens.hidden.dtype))
    out = by_loop(whole, gate_up, down)
    (out * whole.of_out).sum().backward()
    results = {"out": out.detach(), "weights": whole.weights.grad, "gate_up": gate_up.grad, "down": down.grad}
    if whole.hidden.requires_grad:
        results["hidden"] = whole.hidden.grad
    return {name: x for name, x in results.items() if x is not None}


def found(
    rank: int, sizes: list[int], tokens: Batch, exchange: TokenExchange, run: Any = through_experts
) -> dict[str, Tensor]:
    own = tokens.part(sizes, rank)
    mine = slice(rank * EXPERTS // len(sizes), (rank + 1) * EXPERTS // len(sizes))
    gate_up, down = (w.detach()[mine].clone().requires_grad_() for w in matrices(tokens.hidden.dtype))
    out = run(own.hidden, own.index, own.weights, EXPERTS, experts_of(gate_up, down), exchange, own.kept)
    (out.float() * own.of_out.float()).sum().backward()
    assert out.dtype == own.hidden.dtype
    results = {"out": out.detach(), "weights": own.weights.grad, "gate_up": gate_up.grad, "down": down.grad}
    if own.hidden.requires_grad:
        results["hidden"] = own.hidden.grad
    assert all(x is not None for x in results.values()), results
    return results


def compare(rank: int, sizes: list[int], whole: dict[str, Tensor], part: dict[str, Tensor], tolerance: float) -> None:
    assert set(whole) == set(part)
    for name, x in whole.items():
        mine = x.chunk(len(sizes))[rank] if name in ("gate_up", "down") else x.split(sizes)[rank]
        scale = float(x.abs().max())
        torch.testing.assert_close(
            part[name].float(), mine, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


SIZES = {2: [[9, 4], [0, 7]], 4: [[5, 0, 3, 8]]}


def _parity(rank: int, kind: str, size: int) -> None:
    exchange = open_kind(kind)
    for sizes in SIZES[size]:
        for choice, limit in (("spread", None), ("one", None), ("spread", 0.75)):
            tokens = batch(sum(sizes), choice, limit=limit)
            exchange.traffic.reset()
            part = found(rank, sizes, tokens, exchange)
            compare(rank, sizes, expected(tokens), part, 1e-5)
            sent = sizes[rank] * (1 if choice == "one" else TOP_K)
            if limit is None:
                arrived = exchange.traffic.bytes["all_to_all"] - 2 * sent * HIDDEN * 4
                assert arrived >= 0
                if choice == "one":
                    owner = 5 * size // EXPERTS
                    assert arrived == (2 * sum(sizes) * HIDDEN * 4 if rank == owner else 0)
                    assert bool((part["down"] == 0).all()) == (rank != owner)
    exchange.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_compute_what_one_process_does(ranks: RankPool, kind: str, size: int) -> None:
    ranks(size, _parity, kind, size)

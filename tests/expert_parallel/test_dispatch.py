"""Tokens that go to experts on other ranks come back as one process would have them, and so do all gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_5d.expert_parallel.collective_exchange import CollectiveTokenExchange
from lightning_5d.expert_parallel.dispatch import Capacity, Way, kept_by_capacity, limit_of, through_experts
from lightning_5d.expert_parallel.exchange import TokenExchange, open_exchange
from lightning_5d.expert_parallel.grouped import grouped_linear
from lightning_5d.expert_parallel.host_exchange import HostTokenExchange
from lightning_5d.saved_operations import SavedOperations
from tests.ranks.pool import RankPool

KINDS = ["shared memory", "gloo"]
EXPERTS, TOP_K, HIDDEN, INNER = 8, 2, 6, 5


def open_kind(kind: str, group: dist.ProcessGroup | None = None) -> TokenExchange:
    exchange = open_exchange(group or dist.group.WORLD, shared_memory=kind == "shared memory")  # type: ignore[arg-type]
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


def _bf16(rank: int, kind: str) -> None:
    exchange = open_kind(kind)
    tokens = batch(15, "spread", torch.bfloat16)
    compare(rank, [9, 6], expected(tokens), found(rank, [9, 6], tokens, exchange), 2e-2)
    assert exchange.traffic.bytes["all_to_all"] % (HIDDEN * 2) == 0
    exchange.close()


def _checkpointed(*args: Any) -> Tensor:
    out: Tensor = checkpoint(through_experts, *args, use_reentrant=False)  # type: ignore[assignment]
    return out


def _selective(*args: Any) -> Tensor:
    context = partial(create_selective_checkpoint_contexts, SavedOperations(("matmul", "cat", "index_select", "sort")))
    out: Tensor = checkpoint(through_experts, *args, use_reentrant=False, context_fn=context)  # type: ignore[assignment]
    return out


def _overlapped(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    experts: int,
    compute: Any,
    exchange: TokenExchange,
    kept: Tensor | None,
) -> Tensor:
    """Two halves of a batch, each of which is computed while the other one is under way."""
    parts = [
        Way(h, i, experts, exchange, None if kept is None else k)
        for h, i, k in zip(
            hidden.tensor_split(2),
            index.tensor_split(2),
            (index if kept is None else kept).tensor_split(2),
            strict=True,
        )
    ]
    beside = hidden.sin()
    for part in parts:
        part.start_dispatch()
    for part in parts:
        part.start_return(compute(part.arrived(), part.counts_M))
    beside = beside.cos() * 2
    out = torch.cat([part.finish(w) for part, w in zip(parts, weights.tensor_split(2), strict=True)])
    return out + 0 * beside


def _ways(rank: int, kind: str) -> None:
    """All ways of taking the steps give the same numbers, whatever needs gradients."""
    exchange = open_kind(kind)
    sizes = [6, 3]
    for trains_hidden in (True, False):
        tokens = batch(sum(sizes), "spread", limit=0.75)
        tokens.hidden.requires_grad_(trains_hidden)
        whole = expected(tokens)
        for run in (through_experts, _checkpointed, _selective, _overlapped):
            if trains_hidden or run is not _overlapped:
                tokens.weights.grad = None
                compare(rank, sizes, whole, found(rank, sizes, tokens, exchange, run), 1e-5)
        with torch.no_grad():
            own = tokens.part(sizes, rank)
            mine = [w.chunk(2)[rank] for w in matrices()]
            out = through_experts(own.hidden, own.index, own.weights, EXPERTS, experts_of(*mine), exchange, own.kept)
            torch.testing.assert_close(out, whole["out"].split(sizes)[rank])
    exchange.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [_bf16, _ways], ids=["bf16", "ways"])
def test_precisions_and_ways(ranks: RankPool, kind: str, case: Callable[..., None]) -> None:
    ranks(2, case, kind)


def _recomputed(rank: int, kind: str) -> None:
    """What is computed beside the last crossing is the last that a recomputation has to save."""
    exchange = open_kind(kind)
    tokens = batch(9, "spread")
    own = tokens.part([6, 3], rank)
    mine = [w.detach().chunk(2)[rank].requires_grad_() for w in matrices()]

    def forward(hidden: Tensor) -> Tensor:
        way = Way(hidden, own.index, EXPERTS, exchange)
        way.start_dispatch()
        way.start_return(experts_of(*mine)(way.arrived(), way.counts_M))
        beside = hidden.exp()
        return way.finish(own.weights.detach()) + beside

    for _ in range(12):
        out = checkpoint(forward, own.hidden, use_reentrant=False)
        (out * own.of_out).sum().backward()  # type: ignore[operator]
        dist.barrier()
    # Rows that nobody takes keep their memory.
    assert len(exchange.memory()) < 8
    exchange.close()


def test_a_recomputation_never_ends_with_rows_under_way(ranks: RankPool) -> None:
    ranks(2, _recomputed, "shared memory")


def test_one_process_holds_all_experts() -> None:
    for limit in (None, 0.75):
        tokens = batch(9, "spread", limit=limit)
        compare(0, [9], expected(tokens), found(0, [9], tokens, None), 1e-5)  # type: ignore[arg-type]


def _only_weights(rank: int, kind: str) -> None:
    """Neither tokens nor experts are trained: the router is."""
    exchange = open_kind(kind)
    tokens = batch(5, "spread")
    tokens.hidden.requires_grad_(False)
    whole = expected(tokens)
    own = tokens.part([5, 0], rank)
    frozen = [w.detach().chunk(2)[rank] for w in matrices()]
    out = through_experts(own.hidden, own.index, own.weights, EXPERTS, experts_of(*frozen), exchange)
    (out * own.of_out).sum().backward()
    torch.testing.assert_close(own.weights.grad, whole["weights"].split([5, 0])[rank])
    exchange.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_router_is_trained_alone(ranks: RankPool, kind: str) -> None:
    ranks(2, _only_weights, kind)


def _only_asked(rank: int, kind: str) -> None:
    """Several gradients of one graph, of which some are those of a router alone."""
    exchange = open_kind(kind)
    tokens = batch(9, "spread")
    whole = expected(tokens)
    own = tokens.part([6, 3], rank)
    mine = [w.detach().chunk(2)[rank].requires_grad_() for w in matrices()]
    out = through_experts(own.hidden, own.index, own.weights, EXPERTS, experts_of(*mine), exchange)
    loss, held = (out * own.of_out).sum(), []
    for _ in range(3):
        sent = exchange.traffic.calls["all_to_all"]
        (of_weights,) = torch.autograd.grad(loss, own.weights, retain_graph=True)
        torch.testing.assert_close(of_weights, whole["weights"].split([6, 3])[rank])
        assert exchange.traffic.calls["all_to_all"] == sent
        (of_hidden,) = torch.autograd.grad(loss, own.hidden, retain_graph=True)
        torch.testing.assert_close(of_hidden, whole["hidden"].split([6, 3])[rank])
        assert exchange.traffic.calls["all_to_all"] == sent + 2
        held.append(sum(tensor.nbytes for tensor in exchange.memory()))
    assert len(set(held[1:])) == 1
    exchange.close()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_router_alone_send_nothing(ranks: RankPool, kind: str) -> None:
    ranks(2, _only_asked, kind)


def _seconds(rank: int, kind: str) -> None:
    exchange = open_kind(kind)
    tokens = batch(9, "spread").part([6, 3], rank)
    # A router that is not trained: then nothing else on the way would say so.
    mine = [w.detach().chunk(2)[rank].requires_grad_() for w in matrices()]
    out = through_experts(
        tokens.hidden, tokens.index, tokens.weights.detach(), EXPERTS, experts_of(*mine), exchange, tokens.kept
    )
    with pytest.raises(RuntimeError, match="experts on other ranks, which have no second derivatives"):
        torch.autograd.grad(out.square().sum(), tokens.hidden, create_graph=True)
    exchange.close()


def test_second_derivatives_are_refused(ranks: RankPool) -> None:
    ranks(2, _seconds, "shared memory")


def _wrong(rank: int, kind: str) -> None:
    exchange = open_kind(kind)
    tokens = batch(4, "spread")
    with pytest.raises(ValueError, match=r"Experts made \(\d+, 5\) of \d+ rows of 6"):
        through_experts(
            tokens.hidden, tokens.index, tokens.weights, EXPERTS, lambda rows, counts: rows[:, 1:], exchange
        )
    exchange.close()


def test_experts_that_make_other_rows_are_refused(ranks: RankPool) -> None:
    ranks(2, _wrong, "shared memory")


def test_capacity_is_the_rounded_up_share() -> None:
    assert limit_of(100, 2, 8, 1.0) == 25
    assert limit_of(100, 2, 8, 1.25) == 32
    assert limit_of(10, 1, 1, 1.1) == 11  # in floating point a little more


def test_an_expert_over_its_capacity_keeps_the_largest_weights_or_the_first_tokens() -> None:
    index = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 3]])
    weights = torch.tensor([[0.5, 0.5], [0.75, 0.25], [0.5, 0.5], [0.875, 0.125]])
    # Two for each expert.
    by_weight = kept_by_capacity(index, weights, 4, Capacity(1.0, "probability"))
    assert by_weight.tolist() == [[False, True], [True, True], [False, True], [True, True]]
    by_place = kept_by_capacity(index, weights, 4, Capacity(1.0, "position"))
    assert by_place.tolist() == [[True, True], [True, True], [False, True], [False, True]]
    # Of equal weights the earlier token's.
    equal = kept_by_capacity(index, torch.ones(4, 2), 4, Capacity(1.0, "probability"))
    assert torch.equal(equal, by_place)


def test_choices_that_are_left_out_contribute_nothing_even_where_experts_overflow() -> None:
    tokens = batch(9, "spread", limit=0.5)
    assert tokens.kept is not None
    assert not tokens.kept.all()
    out = through_experts(
        tokens.hidden, tokens.index, tokens.weights, EXPERTS, lambda rows, counts: rows * torch.inf, None, tokens.kept
    )
    assert torch.equal(out.isfinite().all(1), ~tokens.kept.any(1))
    (weights,) = torch.autograd.grad(out[tokens.kept.any(1)].nan_to_num().sum(), tokens.weights)
    assert bool((weights[~tokens.kept] == 0).all())

"""Parts of a layer of experts beside other ways to compute them: times of the others over ours.

    python benchmarks/experts_parts.py [--tokens 2048] [--top-k 2] [--hidden 256] [--inner 512] [--experts 8] [--rounds 15]

Grouped products and permutations in one process of one thread; sending in two, there and back, forward only. Ways take turns within
each round; a ratio is the median over rounds. Above 1 ours is faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import answers_of, join
from torch import Tensor

from lightning_5d.expert_parallel import grouped
from lightning_5d.expert_parallel.exchange import open_exchange
from lightning_5d.expert_parallel.grouped import grouped_linear
from lightning_5d.expert_parallel.permutation import gather_rows, sort_choices, weighted_sum

Way = Callable[[], object]


def ratios(ways: dict[str, Way], rounds: int) -> dict[str, float]:
    """The time of each way over that of the first one."""
    for way in ways.values():
        way()
    taken: list[list[float]] = []
    for _ in range(rounds):
        times = []
        for way in ways.values():
            begin = time.perf_counter()
            way()
            times.append(time.perf_counter() - begin)
        taken.append(times)
    return {
        name: statistics.median(times[place] / times[0] for times in taken)
        for place, name in enumerate(ways)
        if place > 0
    }


def show(what: str, found: dict[str, float]) -> None:
    print(f"{what:38}" + "  ".join(f"{name} {ratio:.2f}" for name, ratio in found.items()), flush=True)


def trained(function: Callable[..., Tensor], *operands: Tensor) -> Way:
    """A forward and its backward."""
    grad = torch.randn_like(function(*operands))

    def run() -> None:
        for operand in operands:
            operand.grad = None
        function(*operands).backward(grad)

    return run


def looped(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    native, grouped._NATIVE = grouped._NATIVE, ()
    try:
        return grouped_linear(rows, weights, counts)
    finally:
        grouped._NATIVE = native


def separate(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    parts = rows.split(counts.tolist())
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])


def torchs(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    return F.grouped_mm(rows, weights.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))


def products(options: argparse.Namespace, dtype: torch.dtype, experts: int) -> dict[str, float]:
    index = torch.rand(options.tokens, experts).topk(options.top_k, 1)[1]
    counts = torch.bincount(index.flatten(), minlength=experts)
    rows = torch.randn(index.numel(), options.hidden).to(dtype).requires_grad_()
    weights = (torch.randn(experts, options.inner, options.hidden) / options.hidden**0.5).to(dtype).requires_grad_()
    ways = {"ours": grouped_linear, "own loop": looped, "F.linear each": separate, "F.grouped_mm": torchs}
    return ratios(
        {name: trained(lambda x, w, way=way: way(x, w, counts), rows, weights) for name, way in ways.items()},
        options.rounds,
    )


def permutations(options: argparse.Namespace, dtype: torch.dtype) -> dict[str, float]:
    index = torch.rand(options.tokens, options.experts).topk(options.top_k, 1)[1]
    order = sort_choices(index, options.experts)
    hidden = torch.randn(options.tokens, options.hidden).to(dtype).requires_grad_()
    weights = torch.rand(index.shape, requires_grad=True)

    def ours(hidden: Tensor, weights: Tensor) -> Tensor:
        return weighted_sum(gather_rows(hidden, order), weights, order, dtype)

    def by_index(hidden: Tensor, weights: Tensor) -> Tensor:
        rows = hidden.index_select(0, order.token_S) * weights.flatten()[order.choice_S, None]
        return torch.zeros(hidden.shape).index_add(0, order.token_S, rows.float()).to(dtype)

    return ratios(
        {"ours": trained(ours, hidden, weights), "index_select and index_add": trained(by_index, hidden, weights)},
        options.rounds,
    )


def sending(rank: int, port: int, options: argparse.Namespace, results: Any) -> None:
    try:
        join(rank, port)
        torch.manual_seed(rank)
        group = dist.group.WORLD
        assert group is not None
        index = torch.rand(options.tokens, options.experts).topk(options.top_k, 1)[1]
        order = sort_choices(index, options.experts)
        hidden = torch.randn(options.tokens, options.hidden)
        ways: dict[str, Way] = {}
        exchanges = [open_exchange(group, shared_memory=shared) for shared in (True, False)]
        for name, exchange in zip(("shared memory", "all_to_all_single"), exchanges, strict=True):

            def run(exchange: Any = exchange) -> None:
                routes = exchange.routes(order.counts_E, hidden.shape[1] * hidden.itemsize)
                rows = exchange.start_dispatch(gather_rows(hidden, order, exchange.empty), routes).wait()
                exchange.start_return(rows, routes).wait()

            ways[name] = run
        found = ratios(ways, options.rounds)
        for exchange in exchanges:
            exchange.close()
        dist.destroy_process_group()
        results.put((rank, found, "done"))
    except BaseException:
        results.put((rank, traceback.format_exc()))
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("tokens", 2048),
        ("top-k", 2),
        ("hidden", 256),
        ("inner", 512),
        ("experts", 8),
        ("rounds", 15),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for experts in (options.experts, 16 * options.experts):
            show(f"products, {experts} experts, {str(dtype)[6:]}", products(options, dtype, experts))
        show(f"permutation and sum, {str(dtype)[6:]}", permutations(options, dtype))
    answers = answers_of(sending, options)
    show("to two ranks and back, shared memory", answers[0][1])


if __name__ == "__main__":
    main()

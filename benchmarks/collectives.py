"""Reduce-scatter and all-gather of 40 MB over 2 and 4 ranks: this package's two transports against torch's gloo.

    python benchmarks/collectives.py

Prints milliseconds and the share of torch's time, medians of interleaved rounds in one run.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from lightning_5d.data_parallel.collectives import all_gather, reduce_scatter
from lightning_5d.data_parallel.point_to_point import PointToPoint
from lightning_5d.data_parallel.transports import open_transport

ELEMENTS = 10_000_000


def contest(elements: int = ELEMENTS, rounds: int = 7) -> dict[str, dict[str, float]]:
    """Median seconds of each collective on each transport; call it on every rank of the default group."""
    group, world = dist.group.WORLD, dist.get_world_size()
    full, shard = torch.randn(elements), torch.empty(elements // world)
    point_to_point, shared = PointToPoint(group), open_transport(group)
    calls: dict[str, dict[str, Callable[[], Any]]] = {
        "reduce_scatter": {
            "gloo": lambda: dist.reduce_scatter_single(shard, full),
            "point to point": lambda: reduce_scatter(point_to_point, shard, full),
            "shared memory": lambda: reduce_scatter(shared, shard, full),
        },
        "all_gather": {
            "gloo": lambda: dist.all_gather_single(full, shard),
            "point to point": lambda: all_gather(point_to_point, full, shard),
            "shared memory": lambda: all_gather(shared, full, shard),
        },
    }
    times: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in calls[kind]} for kind in calls}
    for round_number in range(rounds + 1):
        for kind, by_name in calls.items():
            for name, call in by_name.items():
                dist.barrier()
                start = time.perf_counter()
                call()
                if round_number:
                    times[kind][name].append(time.perf_counter() - start)
    shared.close()
    return {
        kind: {name: statistics.median(values) for name, values in by_name.items()} for kind, by_name in times.items()
    }


def _rank(rank: int, world: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    outcome = contest()
    if rank == 0:
        results.put(outcome)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    context = get_context("fork")
    for world in (2, 4):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        results = context.Queue()
        processes = [context.Process(target=_rank, args=(rank, world, port, results)) for rank in range(world)]
        for process in processes:
            process.start()
        outcome = results.get(timeout=120)
        for process in processes:
            process.join()
        for kind, by_name in outcome.items():
            row = ", ".join(
                f"{name} {seconds * 1e3:.1f} ms ({seconds / by_name['gloo']:.2f})" for name, seconds in by_name.items()
            )
            print(f"{world} ranks, 40 MB, {kind}: {row}", flush=True)


if __name__ == "__main__":
    main()

"""Messages between two stages that compute: what they cost over shared memory and over gloo.

    python benchmarks/messages.py [--compute 10] [--kilobytes 512] [--rounds 15]

Two ranks of one thread each compute for some milliseconds, send a message to each other and wait for the other's, over and over,
as in the middle of a schedule. Lost is the time of such a step over that of the computation alone. A message's time one way is
half of that from one rank to the other and back, without computation. Ways take turns within each round; medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from ranks import RANKS, answers_of

from lightning_5d.mesh import ParallelMesh
from lightning_5d.pipeline_parallel.channels import Channels, open_channels

STEPS = 20


def compute(matrix: torch.Tensor, times: int) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        matrix @ matrix
    return time.perf_counter() - begin


def contest(rank: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    mesh = ParallelMesh.create({"pp": RANKS, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}, "cpu")
    device, limit = torch.device("cpu"), timedelta(seconds=60)
    ways: dict[str, Channels] = {
        name: open_channels(mesh, device, limit, shared_memory=name == "shared memory")
        for name in ("shared memory", "gloo")
    }
    matrix, tensor = torch.randn(256, 256), torch.randn(options.kilobytes * 256)
    shapes = [(tensor.shape, tensor.dtype)]
    compute(matrix, 50)
    times = max(1, round(options.compute / 1e3 / min(compute(matrix, 10) / 10 for _ in range(20))))
    found: dict[str, dict[str, list[float]]] = {name: {"step": [], "lost": [], "one way": []} for name in ways}
    for number in range(options.rounds):
        dist.barrier()
        alone = sum(compute(matrix, times) for _ in range(STEPS)) / STEPS
        for name in list(ways)[:: 1 if number % 2 else -1]:
            channels = ways[name]
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(STEPS):
                arriving = channels.receive(shapes, 1 - rank)
                compute(matrix, times)
                channels.send([tensor], 1 - rank)
                arriving.wait()
            channels.finish()
            step = (time.perf_counter() - begin) / STEPS
            dist.barrier()
            begin = time.perf_counter()
            for turn in range(2 * STEPS):
                if turn % 2 == rank:
                    channels.send([tensor], 1 - rank)
                else:
                    channels.receive(shapes, 1 - rank).wait()
            channels.finish()
            found[name]["one way"].append((time.perf_counter() - begin) / (2 * STEPS))
            found[name]["step"].append(step)
            found[name]["lost"].append(step - alone)
    dist.barrier()
    for channels in ways.values():
        channels.close()
    return {
        name: {what: statistics.median(values) for what, values in by_what.items()} for name, by_what in found.items()
    }


def run_rank(rank: int, port: int, options: argparse.Namespace, results: Any) -> None:
    try:
        torch.set_num_threads(1)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=RANKS)
        results.put((rank, contest(rank, options), None))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        results.put((rank, traceback.format_exc()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compute", type=float, default=10.0, help="milliseconds between messages")
    parser.add_argument("--kilobytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    answers = [answer[1] for answer in answers_of(run_rank, options)]
    print(f"{options.kilobytes} KB between {options.compute:g} ms of computation, {options.rounds} rounds of {STEPS}")
    print(f"{'':16}{'step ms':>9}{'lost ms':>9}{'lost share':>12}{'one way us':>12}")
    for name in answers[0]:
        step, lost, one_way = (statistics.mean(a[name][what] for a in answers) for what in ("step", "lost", "one way"))
        print(f"{name:16}{step * 1e3:9.2f}{lost * 1e3:9.2f}{lost / step:12.3f}{one_way * 1e6:12.0f}", flush=True)


if __name__ == "__main__":
    main()

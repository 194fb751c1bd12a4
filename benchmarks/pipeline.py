"""A pipeline of two stages' ranks as a share of the ceiling, beside torch.distributed.pipelining.

    python benchmarks/pipeline.py [--size small] [--rounds 3] [--only "FiveD 1f1b,torch 1f1b"]

Two ranks of one thread on this machine, microbatches of one row. The ceiling is two processes side by side, each of which
trains the whole model on all microbatches: half of its time is a pipeline without bubble, messages or Python. Contestants take
turns within each round; a round's share is the ceiling's time over the contestant's, and the median over rounds is printed. The
bound is the share that the schedule has in `simulate`, with a barrier between steps and the stages' blocks as they are cut: eight
blocks and a head, which costs a little more than a block, cannot be halved, so even a schedule without bubble has a bound below one.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.contestants import trainer
from benchmarks.decoder import SIZES, Decoder, Size
from benchmarks.ranks import RANKS, answers_of, join

WARM_UP = 3
MICROBATCHES = 8
BLOCK, HEAD = (0.32, 0.48, 0.20), (0.34, 0.42, 0.30)
"""F, B and W of a block and of the head with the loss, in blocks of the small size, as measured here on one thread."""
SAME_SPLIT = False
SPLITS = {1: (4, 4), 2: (2, 2, 2, 2)}
"""Blocks of each of torch's stages, by stages per rank. With ``--same-split`` they are those that FiveD takes by itself."""
Step = Callable[[Tensor, Tensor], Any]


def _decoder(size: Size) -> Decoder:
    torch.manual_seed(0)
    return Decoder(size)


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)


def ceiling(size: Size, rank: int) -> Step:
    """The whole model on every rank, nothing shared; its time counts half."""
    module = _decoder(size)
    optimizer = _adamw(module)

    def step(tokens: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        for some, wanted in zip(tokens.split(1), targets.split(1), strict=True):
            (module(some, wanted) / MICROBATCHES).backward()
        optimizer.step()

    return step


class _Stage(nn.Module):
    """Some of the decoder's blocks, with what comes before the first and after the last."""

    def __init__(self, decoder: Decoder, first: int, count: int) -> None:
        super().__init__()
        self.embedding = decoder.embedding if first == 0 else None
        self.layers = decoder.layers[first : first + count]
        last = first + count == len(decoder.layers)
        self.norm, self.head = (decoder.norm, decoder.head) if last else (None, None)
        self.register_buffer("cos", decoder.cos, persistent=False)
        self.register_buffer("sin", decoder.sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x if self.head is None else self.head(self.norm(x))


def torch_pipelining(schedule: str, chunks: int, v_shaped: bool = False) -> Callable[[Size, int], Step]:
    """torch's own stages and schedules on the same blocks."""

    def make(size: Size, rank: int) -> Step:
        from torch.distributed import pipelining
        from torch.distributed.pipelining import schedules

        from lightning_5d.pipeline_parallel import make_schedule

        decoder, count = _decoder(size), RANKS * chunks
        many = schedule == "ScheduleInterleaved1F1B"
        name = {"Schedule1F1B": "1f1b", "ScheduleGPipe": "afab", "ScheduleZBVZeroBubble": "zb_v"}.get(
            schedule, "interleaved_1f1b"
        )
        split = _stages(make_schedule(name, RANKS, MICROBATCHES, chunks=chunks if many else None), "torch", size)
        numbers = [rank, 2 * RANKS - 1 - rank] if v_shaped else list(range(rank, count, RANKS))
        modules = [_Stage(decoder, sum(split[:n]), split[n]) for n in numbers]
        device = torch.device("cpu")
        stages = [pipelining.PipelineStage(m, n, count, device) for m, n in zip(modules, numbers, strict=True)]
        optimizer = _adamw(nn.ModuleList(modules))

        def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

        runs: Any = getattr(schedules, schedule)(stages[0] if chunks == 1 else stages, MICROBATCHES, loss_of)

        def step(tokens: Tensor, targets: Tensor) -> None:
            optimizer.zero_grad()
            inputs = (tokens,) if 0 in numbers else ()
            if count - 1 in numbers:
                runs.step(*inputs, target=targets, losses=[])
            else:
                runs.step(*inputs)
            optimizer.step()

        return step

    return make


def five_d(schedule: str, chunks: int | None = None) -> Callable[[Size, int], Any]:
    """An ordinary LightningModule in a Trainer; returns a function that fits and calls ``tick`` after every step."""

    def strategy() -> Any:
        from lightning_5d import FiveD, PipelineParallel

        return FiveD(PipelineParallel(RANKS, schedule=schedule, microbatches=MICROBATCHES, chunks=chunks))

    return lambda size, rank: trainer(strategy)(size)


CONTESTANTS: dict[str, Callable[[Size, int], Any]] = {
    "ceiling": ceiling,
    "torch afab": torch_pipelining("ScheduleGPipe", 1),
    "FiveD afab": five_d("afab"),
    "torch 1f1b": torch_pipelining("Schedule1F1B", 1),
    "FiveD 1f1b": five_d("1f1b"),
    "torch interleaved_1f1b": torch_pipelining("ScheduleInterleaved1F1B", 2),
    "FiveD interleaved_1f1b": five_d("interleaved_1f1b", 2),
    "torch zb_v": torch_pipelining("ScheduleZBVZeroBubble", 2, v_shaped=True),
    "FiveD zb_v": five_d("zb_v"),
    "FiveD zb_h1": five_d("zb_h1"),
    "FiveD zb_h2": five_d("zb_h2"),
}


def _stages(schedule: Any, name: str, size: Size) -> tuple[int, ...]:
    """Blocks of each stage of a contestant."""
    from lightning_5d.pipeline_parallel.balance import shortest_split

    if name.startswith("torch") and not SAME_SPLIT:
        return SPLITS[schedule.stages // RANKS]
    return shortest_split(schedule, [1.0] * size.layers, last=sum(HEAD))


def bound(name: str, size: Size) -> float:
    """The share of the ceiling that a contestant's schedule and cut allow."""
    from lightning_5d.pipeline_parallel import Durations, make_schedule, simulate

    key = name.split()[-1]
    schedule = make_schedule(key, RANKS, MICROBATCHES, chunks=2 if key == "interleaved_1f1b" else None)
    blocks = _stages(schedule, name, size)
    heads = [stage == len(blocks) - 1 for stage in range(len(blocks))]
    times = [
        tuple(n * block + head * last for n, last in zip(blocks, heads, strict=True))
        for block, head in zip(BLOCK, HEAD, strict=True)
    ]
    return sum(map(sum, times)) * MICROBATCHES / RANKS / simulate(schedule, Durations(*times)).makespan


def run_rank(rank: int, port: int, size_name: str, name: str, steps: int, results: Any) -> None:
    """One rank of one contestant in one round: puts the seconds of a step."""
    try:
        join(rank, port)
        size = dataclasses.replace(SIZES[size_name], batch=MICROBATCHES)
        generator = torch.Generator().manual_seed(0)
        batches = [
            torch.randint(size.vocabulary, (2, size.batch, size.tokens), generator=generator).unbind()
            for _ in range(WARM_UP + steps)
        ]
        wall = [time.perf_counter()]

        def tick() -> None:
            wall.append(time.perf_counter())

        step = CONTESTANTS[name](size, rank)
        dist.barrier()
        if name.startswith("FiveD"):
            step(batches, tick)
        else:
            for tokens, targets in batches:
                step(tokens, targets)
                tick()
        took = statistics.median([b - a for a, b in pairwise(wall)][WARM_UP:])
        results.put((rank, took / RANKS if name == "ceiling" else took, 0))
    except BaseException:
        results.put((rank, traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)


def compare(size_name: str, names: list[str], rounds: int, steps: int) -> None:
    """Runs the rounds and prints the table."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            try:
                answers = answers_of(run_rank, size_name, name, steps)
            except RuntimeError as error:
                print(str(error)[-2500:], file=sys.stderr, flush=True)
                continue
            times[name].append(statistics.mean(answer[1] for answer in answers))
            print(f"{size_name} {name}: {times[name][-1] * 1e3:.1f} ms", file=sys.stderr, flush=True)
    print(
        f"\n{size_name}: {RANKS} ranks, {MICROBATCHES} microbatches, {rounds} rounds of {steps} steps; share of the ceiling"
    )
    for name, measured in times.items():
        if len(measured) < rounds:
            print(f"{name:28}  failed")
            continue
        share = statistics.median(c / m for c, m in zip(times["ceiling"], measured, strict=True))
        own = name.removeprefix("FiveD ")
        beside = ""
        if own != name and f"torch {own}" in times and len(times[f"torch {own}"]) == rounds:
            over = statistics.median(t / m for t, m in zip(times[f"torch {own}"], measured, strict=True))
            beside = f"{over:6.3f} of torch's speed"
        limit = "" if name == "ceiling" else f"{share / bound(name, SIZES[size_name]):7.3f} of its bound"
        print(f"{name:28}{share:7.3f}{statistics.median(measured) * 1e3:9.1f} ms {limit}{beside}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="timed steps in each round")
    parser.add_argument("--only", default="", help="names, or beginnings of names, separated by commas")
    parser.add_argument("--same-split", action="store_true", help="torch's stages are cut where FiveD cuts")
    arguments = parser.parse_args()
    global SAME_SPLIT
    SAME_SPLIT = arguments.same_split
    chosen = tuple(part.strip() for part in arguments.only.split(",")) if arguments.only else ("",)
    names = [name for name in CONTESTANTS if name == "ceiling" or name.startswith(chosen)]
    compare(arguments.size, names, arguments.rounds, arguments.steps)


if __name__ == "__main__":
    main()

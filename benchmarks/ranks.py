"""Ranks of a benchmark on this machine, two if nothing else is said, each a process forked from this one."""

from __future__ import annotations

import os
import socket
import statistics
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

RANKS = 2


def join(rank: int, port: int, ranks: int = RANKS) -> None:
    """Makes this process, of one thread, that rank of the group, as torchrun would."""
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        TORCHELASTIC_RUN_ID="benchmark",
        GROUP_RANK="0",
    )
    dist.init_process_group("gloo", rank=rank, world_size=ranks)


def answers_of(run_rank: Callable[..., None], *arguments: Any, ranks: int = RANKS) -> list[tuple[Any, ...]]:
    """Runs ``run_rank(rank, port, *arguments, results)`` on every rank, and returns what each put into `results`.

    Raises:
        RuntimeError: If a rank put its number and a traceback.
    """
    context = get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = context.Queue()
    processes = [context.Process(target=run_rank, args=(rank, port, *arguments, results)) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        answers: list[tuple[Any, ...]] = [results.get(timeout=300) for _ in processes]
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    for answer in answers:
        if len(answer) == 2:
            raise RuntimeError(f"{arguments} failed on rank {answer[0]}:\n{answer[1]}")
    return answers


def timed(
    rank: int,
    port: int,
    make: Callable[[], Callable[..., Any]],
    batches: list[tuple[Tensor, Tensor]],
    warm_up: int,
    fits: bool,
    results: Any,
    *more: Callable[[], float],
    ranks: int = RANKS,
) -> None:
    """One rank of one contestant: puts its number, seconds and processor seconds of a step, and what `more` says at the end.

    Args:
        rank: This rank.
        port: Where ranks meet.
        make: Makes a step of a batch, or where `fits` a function that fits to batches and tells of every step's end.
        batches: For the first, untimed steps and the timed ones.
        warm_up: Untimed steps.
        fits: See `make`.
        results: Where it puts them; a number and a traceback if something went wrong.
        more: Called at the end.
        ranks: How many ranks there are.
    """
    try:
        join(rank, port, ranks)
        wall, processor = [time.perf_counter()], [time.process_time()]

        def tick() -> None:
            wall.append(time.perf_counter())
            processor.append(time.process_time())

        step = make()
        dist.barrier()
        if fits:
            step(batches, tick)
        else:
            for tokens, targets in batches:
                step(tokens, targets)
                tick()
        took = [b - a for a, b in pairwise(wall)][warm_up:]
        used = [b - a for a, b in pairwise(processor)][warm_up:]
        results.put((rank, statistics.median(took), statistics.mean(used), *(each() for each in more)))
    except BaseException:
        results.put((rank, traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)

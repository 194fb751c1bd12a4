"""Two ranks of a benchmark on this machine, each a process forked from this one."""

from __future__ import annotations

import socket
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

RANKS = 2


def answers_of(run_rank: Callable[..., None], *arguments: Any) -> list[tuple[Any, ...]]:
    """Runs ``run_rank(rank, port, *arguments, results)`` on every rank, and returns what each put into `results`.

    Raises:
        RuntimeError: If a rank put its number and a traceback.
    """
    context = get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = context.Queue()
    processes = [context.Process(target=run_rank, args=(rank, port, *arguments, results)) for rank in range(RANKS)]
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

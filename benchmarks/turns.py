"""Contestants that are all there at once and step in turns, a few steps at a time, so that each is compared with what ran just before it."""

from __future__ import annotations

import os
import socket
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import torch.distributed as dist

from benchmarks.ranks import RANKS, join

_LONGEST_S = 300


@dataclass
class Turns:
    """The turns of one rank of a contestant: `tick` is called after each of its steps.

    Args:
        rank: This rank.
        go: Acquired at the begin of each turn.
        reports: Where it puts (rank, seconds, processor seconds) of a step at the end of each.
        untimed: Steps of the first turn, which is not reported as a time.
        steps: Timed steps of each other turn, after one whose caches are not its own.
    """

    rank: int
    go: Any
    reports: Any
    untimed: int
    steps: int
    _left: int = 0
    _took: list[tuple[float, float]] = field(default_factory=list)
    _last: tuple[float, float] = (0.0, 0.0)

    def begin(self) -> None:
        """Waits for the first turn."""
        self.go.acquire()
        self._left = self.untimed
        self._last = _now()

    def tick(self) -> None:
        """Ends a step, and perhaps a turn: then it returns in the next one."""
        now = _now()
        self._took.append((now[0] - self._last[0], now[1] - self._last[1]))
        self._left -= 1
        if not self._left:
            timed = self._took[1:] or self._took
            self.reports.put((self.rank, *(statistics.median(times) for times in zip(*timed, strict=True))))
            self._took = []
            self.go.acquire()
            self._left = self.steps + 1
            now = _now()
        self._last = now


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def in_turns(
    make: Callable[[str, int, Turns], Callable[[], Sequence[float]]],
    names: Sequence[str],
    rounds: int,
    untimed: int,
    steps: int,
) -> tuple[list[dict[str, tuple[float, float]]], dict[str, list[tuple[Any, ...]]]]:
    """Runs contestants on `RANKS` ranks each.

    Args:
        make: Of a name, a rank and its turns: makes what runs all steps, ``untimed + rounds * (steps + 1)`` of them, calling `Turns.tick` after each.
        names: The contestants.
        rounds: In each of them every contestant has one turn.
        untimed: Steps before the first round.
        steps: Timed steps of a turn.

    Returns:
        For each round the seconds and processor seconds of a step of each contestant, means over ranks; and what each rank has returned, by name.

    Raises:
        RuntimeError: If a rank failed.
    """
    context = get_context("fork")
    go = {name: context.Semaphore(0) for name in names}
    reports = {name: context.Queue() for name in names}
    processes = []
    for name in names:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(RANKS):
            turns = Turns(rank, go[name], reports[name], untimed, steps)
            processes.append(context.Process(target=_run_rank, args=(name, port, make, turns)))

    def turn(name: str) -> list[tuple[Any, ...]]:
        for _ in range(RANKS):
            go[name].release()
        answers = [reports[name].get(timeout=_LONGEST_S) for _ in range(RANKS)]
        for answer in answers:
            if isinstance(answer[-1], str):
                raise RuntimeError(f"{name} failed on rank {answer[0]}:\n{answer[1]}")
        return answers

    for process in processes:
        process.start()
    try:
        for name in names:
            turn(name)
        measured = []
        for number in range(rounds):
            # Who follows whom is not the same in every round.
            order = names if number % 2 == 0 else list(reversed(names))
            times = {name: turn(name) for name in order}
            measured.append(
                {name: tuple(statistics.mean(x) for x in list(zip(*times[name], strict=True))[1:]) for name in names}
            )
        return measured, {name: sorted(turn(name)) for name in names}  # type: ignore[return-value]
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _run_rank(name: str, port: int, make: Any, turns: Turns) -> None:
    try:
        turns.begin()
        join(turns.rank, port)
        run = make(name, turns.rank, turns)
        dist.barrier()
        turns.reports.put((turns.rank, *run()))
    except BaseException:
        turns.reports.put((turns.rank, traceback.format_exc()))
    turns.reports.close()
    turns.reports.join_thread()
    os._exit(0)

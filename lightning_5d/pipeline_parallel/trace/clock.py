"""One clock for all ranks of a group."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

_ROUNDS = 8
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class SharedClock:
    """How this rank's ``perf_counter`` is to be read so that all ranks of a group agree.

    Attributes:
        offset: Seconds to add, to get the clock of the group's first rank.
        error: By how many seconds that may be wrong at most; the same on all ranks, that of the worst.
    """

    offset: float = 0.0
    error: float = 0.0


def shared_clock(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    host: str | None = None,
    now: Callable[[], float] = perf_counter,
) -> SharedClock:
    """Finds out how the clocks of a group's ranks differ; every rank of the group calls it.

    Ranks on one host read one clock (CLOCK_MONOTONIC). Between hosts each rank asks the first one for the time, some times over: what
    came back fastest is off by half its round trip at most (Cristian's algorithm).

    Args:
        group: The ranks.
        device: Where its messages have to be.
        host: What tells this host from others; its name and its boot if ``None``.
        now: The clock.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    hosts: list[str | None] = [None] * size
    dist.all_gather_object(hosts, host or this_host(), group=group)
    if len(set(hosts)) == 1:
        return SharedClock()
    own = SharedClock()
    for other in range(1, size):
        if rank == 0:
            _answer(group, device, other, now)
        elif rank == other:
            own = _ask(group, device, now)
    errors: list[float] = [0.0] * size
    dist.all_gather_object(errors, own.error, group=group)
    return SharedClock(own.offset, max(errors))


def this_host() -> str:
    """What tells one run of an operating system from any other."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return f"{socket.gethostname()} {boot}"


def _answer(group: dist.ProcessGroup, device: torch.device, other: int, now: Callable[[], float]) -> None:
    message = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(_ROUNDS):
        dist.recv(message, group=group, group_src=other)
        message.item()  # an accelerator's receive returns before it has happened
        dist.send(torch.full_like(message, now()), group=group, group_dst=other)


def _ask(group: dist.ProcessGroup, device: torch.device, now: Callable[[], float]) -> SharedClock:
    message = torch.zeros(1, dtype=torch.float64, device=device)
    best = SharedClock(0.0, float("inf"))
    for _ in range(_ROUNDS):
        asked = now()
        dist.send(message, group=group, group_dst=0)
        dist.recv(message, group=group, group_src=0)
        theirs = float(message.item())
        came = now()
        if (came - asked) / 2 < best.error:
            best = SharedClock(theirs - (asked + came) / 2, (came - asked) / 2)
    return best

"""Several stages per rank: interleaved 1F1B, its mixtures, and looped breadth-first."""

from __future__ import annotations

from itertools import pairwise

from lightning_5d.pipeline_parallel.schedule import Action, Kind, Schedule, looped_placement
from lightning_5d.pipeline_parallel.schedules.one_forward_one_backward import alternate


def interleaved_1f1b(ranks: int, microbatches: int, *, chunks: int = 2, group_size: int | None = None) -> Schedule:
    """1F1B over v stages per rank, which divides the bubble by v (Narayanan et al. 2021, section 2.2).

    Forwards and backwards go through the microbatches in groups of g: all of a group through a rank's first stage, then all of it
    through its second, and so on. With g = p, the default, microbatches go as deep as they can as soon as they can (depth-first). A
    larger g gives every message more time to arrive before it is needed, and keeps more activations; g = m is
    breadth-first, and what lies between is the mixture of Llama 3 (Grattafiori et al. 2024, section 3.3.2).

    Bubble (p - 1)(F + B + W)/v where no group is below p, more otherwise; rank 0 keeps min(m, ((v - 1)g + 2p - 1)/v)
    microbatches, which for g = p ≤ m/2 is p(1 + (p - 1)/(pv)).

    Any m runs. Where g does not divide m, groups are of nearly the same size: none above a g that was given, and by default
    none below p if m is not.

    Args:
        ranks: p; rank r holds stages r, r + p, …, r + (v - 1)p.
        microbatches: m, any number.
        chunks: v, stages per rank, from 2.
        group_size: g, from p to m (m itself where there are fewer than p microbatches).

    Raises:
        ValueError: If the number of chunks or the group size does not fit.
    """
    _check_chunks("interleaved_1f1b", chunks, without="1f1b")
    smallest = min(ranks, microbatches)
    if group_size is not None and not smallest <= group_size <= microbatches:
        nearest = smallest if group_size < smallest else microbatches
        raise ValueError(
            f"group_size is {group_size}, but with {ranks} ranks and {microbatches} microbatches it goes from {smallest} "
            f"(depth-first) to {microbatches} (breadth-first); the nearest is {nearest}."
        )
    groups = _groups(ranks, microbatches, group_size)
    rows = tuple(
        alternate(
            _actions(Kind.FORWARD, rank, ranks, chunks, groups),
            _actions(Kind.BACKWARD, rank, ranks, chunks, groups),
            min((chunks - 1) * len(groups[0]) + 2 * (ranks - 1 - rank), chunks * microbatches),
        )
        for rank in range(ranks)
    )
    return Schedule("interleaved_1f1b", (looped_placement(ranks, chunks),), (0,) * microbatches, rows)


def looped_bfs(ranks: int, microbatches: int, *, chunks: int = 2) -> Schedule:
    """All microbatches through a rank's first stage, then all through its second, …, then all backwards (Lamy-Poirier 2022).

    A stage's work is done in one piece, so that with ZeRO-3 its parameters are gathered once, and with any ZeRO stage the
    reduction of its gradients overlaps with the stages that are left. Bubble (p - 1)(F + B + W)/v for m ≥ p (more below), and
    all m microbatches are kept.

    Args:
        ranks: p; rank r holds stages r, r + p, …, r + (v - 1)p.
        microbatches: m, any number.
        chunks: v, stages per rank, from 2.

    Raises:
        ValueError: If the number of chunks does not fit.
    """
    _check_chunks("looped_bfs", chunks, without="afab")
    group = [range(microbatches)]
    rows = tuple(
        (
            *_actions(Kind.FORWARD, rank, ranks, chunks, group),
            *_actions(Kind.BACKWARD, rank, ranks, chunks, group),
        )
        for rank in range(ranks)
    )
    return Schedule("looped_bfs", (looped_placement(ranks, chunks),), (0,) * microbatches, rows)


def _check_chunks(name: str, chunks: int, without: str) -> None:
    if chunks < 2:
        raise ValueError(f"{name} with {chunks} chunks per rank; it takes 2 or more, and with 1 it would be {without}.")


def _groups(ranks: int, microbatches: int, group_size: int | None) -> list[range]:
    """The microbatches in groups, the larger ones first."""
    number = max(1, microbatches // ranks) if group_size is None else -(-microbatches // group_size)
    size, larger = divmod(microbatches, number)
    starts = [group * size + min(group, larger) for group in range(number + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _actions(kind: Kind, rank: int, ranks: int, chunks: int, groups: list[range]) -> list[Action]:
    loop = range(chunks) if kind is Kind.FORWARD else reversed(range(chunks))
    stages = [chunk * ranks + rank for chunk in loop]
    return [Action(kind, stage, microbatch) for group in groups for stage in stages for microbatch in group]

"""Whether what the ranks of a pipeline have given to a function are parts of what one process would give to it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Given(NamedTuple):
    """What one rank has given to a call.

    Attributes:
        listed: First names of parameters in the whole module, each with the name that this rank knows it by.
        held: First names of all that it could have given: parameters with gradients.
        groups: Optimizers and groups of parameters that it would also be; group -1 for all of an optimizer's.
    """

    listed: tuple[tuple[str, str], ...]
    held: frozenset[str]
    groups: frozenset[tuple[int, int]]

    @property
    def names(self) -> frozenset[str]:
        """First names of what is listed."""
        return frozenset(first for first, _ in self.listed)


def problem_of(given: Sequence[Given], by_place: Sequence[Sequence[int]]) -> str | None:
    """Why it cannot be seen that parts belong together; ``None`` if they do.

    They do if they are all of the model, one group of an optimizer, on one place of the pipeline alone, or all that go by the same
    names but for numbers, such as the biases of all layers.

    Args:
        given: By rank.
        by_place: The ranks at each place of the pipeline.
    """
    whole = frozenset().union(*(each.names for each in given))
    held = frozenset().union(*(each.held for each in given))
    for rank, each in enumerate(given):
        left_out = sorted((each.held & whole) - each.names)
        if left_out:
            giver = next(other for other, theirs in enumerate(given) if left_out[0] in theirs.names)
            return (
                f"rank {giver} gave {left_out[0]}, which rank {rank} holds too and did not give. A weight that several stages share has"
                " to change on all of them alike: give it on all ranks, under each of its names."
            )
    places = [frozenset().union(*(given[rank].names for rank in ranks)) for ranks in by_place]
    if any(part == whole for part in places) or whole == held:
        return None
    if frozenset.intersection(*(each.groups for each in given)):
        return None
    kinds = {_kind(name) for name in whole}
    missing = sorted(name for name in held if name not in whole and _kind(name) in kinds)
    if not missing:
        return None
    listed = "; ".join(f"{_few(part)} at place {place}" for place, part in enumerate(places) if part)
    return (
        f"the stages gave different parts of the model ({listed}), and it cannot be seen that they belong together: {missing[0]}, of the"
        " same kind, is missing. Give all parameters, a group of the optimizer, or on all ranks a layer of one stage; or one tensor, not"
        " in a list, for a norm of that tensor alone."
    )


def counted_by(given: Sequence[Given], by_place: Sequence[Sequence[int]]) -> Mapping[str, tuple[int, str]]:
    """For each first name that any rank has listed: the first place that has, and the name it goes by; in the same order everywhere.

    Args:
        given: By rank.
        by_place: The ranks at each place of the pipeline.
    """
    found: dict[str, tuple[int, str]] = {}
    for place, ranks in enumerate(by_place):
        for rank in ranks:
            for first, name in given[rank].listed:
                found.setdefault(first, (place, name))
    return found


def _kind(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _few(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)[:2]) + (", …" if len(names) > 2 else "")

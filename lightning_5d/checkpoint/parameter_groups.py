"""The parameter groups of one process, from those of ranks that hold different stages of a module."""

# [Note: order of parameters]
# A checkpoint numbers an optimizer's parameters in the order in which `configure_optimizers` listed them. A stage has listed its
# own alone, so the order over all stages is inferred: people list parameters as the module does, or backwards, or module by
# module in an order of their own (the head before the backbone). In each case a parameter is followed by the one that
# follows it in the module, unless a rank that holds both says otherwise.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Group:
    """One parameter group of one rank's optimizer.

    Attributes:
        options: Learning rate and the like.
        names: Its parameters, by the first name each has in the whole module.
        placed: Those of them that this rank has under their first name: only their order says something.
        own_names: The names by which the optimizer itself knows them, if any.
    """

    options: Mapping[str, Any]
    names: tuple[str, ...]
    placed: tuple[str, ...]
    own_names: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Joined:
    """The groups of all ranks as one.

    Attributes:
        groups: As one process would have them.
        places: For each rank, which of `groups` each of its own belongs to.
    """

    groups: tuple[Group, ...]
    places: tuple[tuple[int, ...], ...]

    @property
    def numbers(self) -> dict[str, int]:
        """The number of each parameter in a checkpoint."""
        names = [name for group in self.groups for name in group.names]
        return {name: number for number, name in enumerate(names)}


def join_groups(ranks: Sequence[Sequence[Group]], position: Mapping[str, int]) -> Joined:
    """Joins the groups of ranks that hold different stages.

    Where all ranks have equally many with the same options, the n-th groups of all are one. Otherwise those with the same options
    are, wherever they stand: a rank may have left out empty groups, or have one for each of its layers.

    Args:
        ranks: The groups of each rank, in order.
        position: Each parameter's place in the whole module; others come after.
    """
    options = [[_fixed(group) for group in groups] for groups in ranks]
    if all(mine == options[0] for mine in options):
        keys: list[list[Any]] = [list(range(len(mine))) for mine in options]
    else:
        distinct: list[Any] = []
        for each in (each for mine in options for each in mine):
            if each not in distinct:
                distinct.append(each)
        keys = [
            [(distinct.index(each), mine[:index].count(each)) for index, each in enumerate(mine)] for mine in options
        ]
    members: dict[Any, list[Group]] = {}
    for groups, mine_keys in zip(ranks, keys, strict=True):
        for group, key in zip(groups, mine_keys, strict=True):
            members.setdefault(key, []).append(group)
    last = len(position)
    first = {
        key: min((position.get(name, last) for group in groups for name in group.names), default=last)
        for key, groups in members.items()
    }
    order = merge_orders(keys, first) if keys and not isinstance(next(iter(members), 0), int) else sorted(members)
    joined = []
    for key in order:
        groups = members[key]
        placed = merge_orders([group.placed for group in groups], position)
        rest = [name for group in groups for name in group.names]
        names = tuple(dict.fromkeys([*placed, *rest]))
        own = [group.own_names for group in groups if group.own_names is not None]
        own_names = {name: text for each in reversed(own) for name, text in each.items()} if own else None
        joined.append(Group(groups[0].options, names, names, own_names))
    places = tuple(tuple(order.index(key) for key in mine) for mine in keys)
    return Joined(tuple(joined), places)


def merge_orders(lists: Sequence[Sequence[Any]], position: Mapping[Any, int]) -> list[Any]:
    """One order of all entries of several lists that agrees with each of them as far as they agree with each other.

    See [Note: order of parameters].

    Args:
        lists: Parts of one list, in its order, which may overlap.
        position: The entries' places in the usual order.
    """
    last = len(position)
    usual = sorted(dict.fromkeys(item for items in lists for item in items), key=lambda item: position.get(item, last))
    rank = {item: index for index, item in enumerate(usual)}
    places = [[rank[item] for item in items] for items in lists]
    if any(len(items) > 1 for items in places) and all(a > b for items in places for a, b in pairwise(items)):
        return usual[::-1]
    found = _chained([{place: index for index, place in enumerate(items)} for items in places], len(usual))
    return [usual[place] for place in found]


def _chained(lists: Sequence[Mapping[int, int]], count: int) -> list[int]:
    """The numbers below `count` in an order that agrees with the lists, each followed by its successor wherever that may be."""
    chain_of, chains = {}, list[list[int]]()
    for number in range(count):
        linked = number > 0 and all(
            index[number] == index[number - 1] + 1 for index in lists if number in index and number - 1 in index
        )
        if not linked:
            chains.append([])
        chains[-1].append(number)
        chain_of[number] = len(chains) - 1
    before: list[set[int]] = [set() for _ in chains]
    for index in lists:
        for a, b in pairwise(sorted(index, key=index.__getitem__)):
            if chain_of[a] != chain_of[b]:
                before[chain_of[b]].add(chain_of[a])
    done: list[int] = []
    while len(done) < len(chains):
        free = [c for c in range(len(chains)) if c not in done and before[c] <= set(done)]
        if not free:
            return list(range(count))  # the lists contradict each other
        done.append(free[0])
    return [number for chain in done for number in chains[chain]]


def _fixed(group: Group) -> dict[str, Any]:
    """The options that no schedule changes."""
    return {key: value for key, value in group.options.items() if key != "lr" or "initial_lr" not in group.options}

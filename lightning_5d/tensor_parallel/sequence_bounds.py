"""Between which modules the sequence may be cut."""

from __future__ import annotations

from collections.abc import Sequence as Many

from torch import nn

from lightning_5d.parallelism import Problem
from lightning_5d.plan import ParallelPlan
from lightning_5d.tensor_parallel import problems as say
from lightning_5d.tensor_parallel.groups import Group, is_norm, norm_size
from lightning_5d.tensor_parallel.layout import Sequence


def find_sequence(
    module: nn.Module, plan: ParallelPlan, blocks: list[str], groups: Many[Group]
) -> tuple[Sequence | None, list[Problem]]:
    """The blocks between which activations are cut along the sequence, and the module that makes it whole again.

    That is the norm behind the blocks, if it is clear which one it is: a sibling of their list, registered behind it, over
    as many features as the blocks have, and alone in that. Otherwise it is the last block, which is always right and
    leaves the norm's work to every rank.
    """
    lists: dict[str, list[str]] = {}
    for block in blocks:
        lists.setdefault(block.rpartition(".")[0], []).append(block)
    used = {
        owner: names
        for owner, names in lists.items()
        if any(_inside(group, name) for group in groups for name in names)
    }
    problems = [say.not_a_sequence(group.name) for group in groups if any(_is_expert(group, name) for name in blocks)]
    if not lists:
        return None, [say.no_sequence(type(module).__name__)]
    if len(used) > 1:
        return None, [*problems, say.many_lists(list(used))]
    if not used:
        return None, problems
    ((owner, names),) = used.items()
    inside = [group for group in groups if any(_inside(group, name) for name in names)]
    hidden = {row.linear.out_features for group in inside for row in group.rows}
    return Sequence(tuple(names), _norm_behind(module, plan, owner, hidden) or names[-1]), problems


def _inside(group: Group, block: str) -> bool:
    return group.name == block or group.name.startswith(f"{block}.")


def _is_expert(group: Group, block: str) -> bool:
    return group.name.startswith(f"{block}.") and any(
        part.isdecimal() for part in group.name.removeprefix(f"{block}.").split(".")
    )


def _norm_behind(module: nn.Module, plan: ParallelPlan, owner: str, hidden: set[int]) -> str | None:
    above, _, own = owner.rpartition(".")
    siblings = list(module.get_submodule(above).named_children()) if owner else []
    names = [name for name, _ in siblings]
    behind = siblings[names.index(own) + 1 :] if own in names else []
    prefix = f"{above}." if above else ""
    found = [prefix + name for name, child in behind if _may_be_final(name, child, hidden)]
    found = [name for name in found if name not in plan.before] or found
    return found[0] if len(found) == 1 else None


def _may_be_final(name: str, child: nn.Module, hidden: set[int]) -> bool:
    # timm's fc_norm and its like come behind pooling over the sequence.
    return is_norm(child) and norm_size(child) in hidden and not name.startswith(("fc_", "pool"))

"""Which parameters belong to which block, so that every parameter is sharded exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn


@dataclass
class Blocks:
    """A module cut into blocks.

    Attributes:
        modules: Blocks to shard on their own, inner ones before those that contain them.
        left_to_root: Parameters that occur inside a block but belong to the root's group.
    """

    modules: list[nn.Module]
    left_to_root: set[nn.Parameter] = field(default_factory=set)


def cut(root: nn.Module, blocks: Sequence[nn.Module]) -> Blocks:
    """Decides which of ``blocks`` can be sharded on their own.

    A parameter tied between a block and the rest of the module is left to the root. Blocks tied to each other are
    left to the root as a whole, because a group spans all uses of its parameters. So is a block without parameters.

    Raises:
        ValueError: If a block is not inside ``root``, or is the root.
    """
    depth = {id(module): name.count(".") + 1 if name else 0 for name, module in root.named_modules()}
    unique = list({id(block): block for block in blocks}.values())
    for block in unique:
        if depth.get(id(block), 0) == 0:
            place = "is the root itself" if block is root else "is not inside the module to shard"
            raise ValueError(f"The block {type(block).__name__} {place}; blocks must be submodules of it.")
    unique.sort(key=lambda block: -depth[id(block)])
    inside = {id(block): {id(inner) for inner in block.modules()} for block in unique}

    owners: dict[nn.Parameter, set[int]] = {}
    for module in root.modules():
        for param in module.parameters(recurse=False):
            # The innermost block that contains the module (they are sorted inner first); None is the root.
            owner = next((id(block) for block in unique if id(module) in inside[id(block)]), id(root))
            owners.setdefault(param, set()).add(owner)
    tied_blocks: set[int] = set()
    left: set[nn.Parameter] = set()
    for param, places in owners.items():
        if len(places) > 1:
            left.add(param)
            if len(places - {id(root)}) > 1:
                tied_blocks |= places - {id(root)}
    kept = [
        block
        for block in unique
        if id(block) not in tied_blocks and any(owners[param] == {id(block)} for param in block.parameters())
    ]
    return Blocks(kept, left)


def outer_modules(root: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The outermost modules with parameters that neither hold blocks nor are inside of one: embedding, last norm, head."""
    around = {id(module) for module in root.modules() if any(inner in blocks for inner in module.modules())}
    found: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        for child in module.children():
            if id(child) not in around:
                if any(True for _ in child.parameters()):
                    found.append(child)
            elif child not in blocks:
                look(child)

    look(root)
    return found

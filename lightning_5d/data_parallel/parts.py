"""To which part of a schedule the weights of a module belong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from lightning_5d.parallelism import Part


class Owners:
    """Looks up the part that uses some modules alone.

    Args:
        parts: The parts of a schedule.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._stages: dict[int, set[int]] = {}
        for part in parts:
            for module in part.modules:
                for inner in module.modules():
                    self._stages.setdefault(id(inner), set()).add(part.stage)

    def only(self, modules: Iterable[nn.Module]) -> int | None:
        """The stage whose part alone holds all of the modules; ``None`` if there is none."""
        found: set[int] = set()
        for module in modules:
            stages = self._stages.get(id(module))
            if stages is None:
                return None
            found |= stages
        return next(iter(found)) if len(found) == 1 else None

    def of_parameters(self, root: nn.Module) -> dict[nn.Parameter, int | None]:
        """The same for each parameter of a module, by the modules that hold it."""
        holders: dict[nn.Parameter, list[nn.Module]] = {}
        for module in root.modules():
            for parameter in module.parameters(recurse=False):
                holders.setdefault(parameter, []).append(module)
        return {parameter: self.only(modules) for parameter, modules in holders.items()}

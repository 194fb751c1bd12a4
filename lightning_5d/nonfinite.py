"""Gradients that are NaN or infinite: which parameters they belong to, and a word about norms that are not finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_5d.gradients import values_of
from lightning_5d.names import plain_name

if TYPE_CHECKING:
    from lightning_5d.mesh import ParallelMesh


@dataclass(frozen=True)
class NonfiniteGradient:
    """A parameter with NaN or infinite elements in its gradient.

    Attributes:
        name: Its fully-qualified name.
        ranks: The ranks whose piece of the gradient holds such elements; all that hold a copy, where it is replicated.
    """

    name: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"{self.name} (rank{'s' if len(self.ranks) > 1 else ''} {ranks})"


def nonfinite_gradients(module: nn.Module, mesh: ParallelMesh | None = None) -> list[NonfiniteGradient]:
    """The parameters whose gradients are not finite somewhere, in module order; every rank calls it.

    One exchange of names, so it is for the rare step where the answer is of interest.

    Args:
        module: The module, as this rank holds it.
        mesh: The ranks by axis; ``None`` if there is only one rank.
    """
    # Pipeline stages come in the module's order; on ranks of one stage the same position is the same parameter.
    stage = 0 if mesh is None else mesh.rank("pp")
    mine = [(stage, position, name) for position, name in _local(module)]
    if mesh is None or not dist.is_initialized() or dist.get_world_size() == 1:
        everyone = [mine]
    else:
        everyone = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
    found: dict[str, tuple[tuple[int, int], list[int]]] = {}
    for rank, entries in enumerate(everyone):
        for place, position, name in entries:
            known, ranks = found.setdefault(name, ((place, position), []))
            found[name] = (min(known, (place, position)), [*ranks, rank])
    ordered = sorted(found.items(), key=lambda item: item[1][0])
    return [NonfiniteGradient(name, tuple(ranks)) for name, (_, ranks) in ordered]


@torch.no_grad()
def _local(module: nn.Module) -> list[tuple[int, str]]:
    named = [
        (position, plain_name(name), values_of(parameter.grad))
        for position, (name, parameter) in enumerate(module.named_parameters())
        if parameter.grad is not None
    ]
    flags = [values.isfinite().all().cpu() for _, _, values in named]
    return [(position, name) for (position, name, _), finite in zip(named, flags, strict=True) if not finite]


class NonfiniteNorms:
    """Says, once, that a gradient norm was not finite: clipping by it makes NaN of the weights.

    On an accelerator the answer is read when the next norm comes, so that nothing waits for the device.
    """

    def __init__(self) -> None:
        self._pending: tuple[Tensor, torch.Event] | None = None
        self._said = False

    def look_at(self, norm: Tensor) -> None:
        """Takes note of the norm that a step clips by."""
        if self._said:
            return
        self.settle()
        finite = norm.isfinite()
        if finite.device.type == "cpu":
            self._judge(finite)
            return
        event = torch.Event(finite.device)
        host = finite.to("cpu", non_blocking=True)
        event.record()
        self._pending = (host, event)

    def settle(self) -> None:
        """Reads the answer that is still on its way."""
        if self._pending is not None:
            finite, event = self._pending
            self._pending = None
            event.synchronize()
            self._judge(finite)

    def _judge(self, finite: Tensor) -> None:
        if bool(finite) or self._said:
            return
        self._said = True
        rank_zero_warn(
            "The norm of the gradients is not finite. Clipping multiplies them by max_norm / norm, so this step makes NaN of"
            " weights, as it does without FiveD. The callback GradientClipping(skip_nonfinite=True) leaves such steps out"
            " and names the parameter if they go on. (Said once.)"
        )

"""How many tokens each expert gets: counted where tokens come to experts, read once per optimizer step.

Shape suffixes: N tokens, K experts that each is sent to, E experts of a layer, T experts of all layers, one after the other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_5d.expert_parallel.dispatch import is_of_somebody
from lightning_5d.hidden_operations import hidden_operations
from lightning_5d.repeated_runs import is_repeated

if TYPE_CHECKING:
    from lightning_5d.expert_parallel.found import FoundExperts


def choices_per_expert(index_NK: Tensor, experts: int, counted: Tensor | None = None) -> Tensor:
    """How often each expert is chosen, (E,) integers on the device of the indices, which is not waited for.

    Choices of experts that there are not count nowhere.

    Args:
        index_NK: The experts of each token.
        experts: E.
        counted: Of which tokens (N,), or of which choices (N, K), as booleans; all if ``None``.
    """
    chosen = index_NK.flatten().long()
    ones = is_of_somebody(chosen, experts)
    if counted is not None:
        ones &= (counted if counted.ndim == index_NK.ndim else counted.unsqueeze(-1)).expand_as(index_NK).flatten()
    # Not `bincount`, which on a device looks at its input before it makes its result, and is no faster on the CPU.
    counts = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(0, chosen.clamp(0, experts - 1), ones.long())


class LayerLoad:
    """The tokens that come to the experts of one layer.

    Args:
        loads: Those of all layers.
        place: Where this layer's experts are among all.
    """

    def __init__(self, loads: ExpertLoads, place: slice) -> None:
        self._loads, self._place = loads, place

    @property
    def experts(self) -> int:
        """E."""
        return int(self._place.stop - self._place.start)

    @property
    def counting(self) -> bool:
        """Whether somebody wants to know of what runs now; else there is nothing to `add`."""
        return self._loads.counting and not is_repeated()

    def add(self, counts_E: Tensor, dropped_E: Tensor | None = None) -> None:
        """Adds a microbatch, as far as this rank counts it: over all ranks each token has to come once.

        Does nothing where nobody wants to know, and where backward runs a layer again.

        Args:
            counts_E: How often each expert was chosen, whatever became of it; integers.
            dropped_E: Of these, how many it left out.
        """
        if not self.counting or counts_E.is_meta:
            return
        with hidden_operations(), torch.no_grad():
            sums_2T = self._loads.sums(counts_E.device)
            sums_2T[0, self._place] += counts_E
            if dropped_E is not None:
                sums_2T[1, self._place] += dropped_E

    def add_choices(self, index_NK: Tensor, counted: Tensor | None = None, kept_NK: Tensor | None = None) -> None:
        """`add`, from the choices themselves.

        Args:
            index_NK: The experts of each token.
            counted: Which tokens this rank counts, as booleans (N,); all if ``None``.
            kept_NK: Which choices experts have room for; all if ``None``.
        """
        if not self.counting or index_NK.is_meta:
            return
        with hidden_operations(), torch.no_grad():
            counts_E = choices_per_expert(index_NK, self.experts, counted)
            dropped_E = None
            if kept_NK is not None:
                left_out = ~kept_NK if counted is None else ~kept_NK & counted.unsqueeze(-1)
                dropped_E = choices_per_expert(index_NK, self.experts, left_out)
        self.add(counts_E, dropped_E)


class ExpertLoads(Mapping[str, LayerLoad]):
    """The loads of all layers with experts, by name, on each rank for the whole module: also of layers that other stages hold.

    Args:
        layers: How many experts each layer has, by the name of its experts in the whole module.

    Attributes:
        counting: Whether loads are counted now. Off until somebody who reads them says so, as `ExpertLoad` does around training steps.
    """

    def __init__(self, layers: Mapping[str, int]) -> None:
        self.counting = False
        self._sums_2T: Tensor | None = None
        self._layers: dict[str, LayerLoad] = {}
        start = 0
        for name, experts in layers.items():
            self._layers[name] = LayerLoad(self, slice(start, start + experts))
            start += experts
        self.total = start

    @classmethod
    def of(cls, found: Sequence[FoundExperts]) -> ExpertLoads:
        """Those of layers as they were found in the whole module."""
        return cls({layer.name: layer.count for layer in found})

    def __getitem__(self, name: str) -> LayerLoad:
        return self._layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def sums(self, device: torch.device) -> Tensor:
        """What was added since they were last taken: choices and dropped ones of all layers' experts, (2, T)."""
        if self._sums_2T is None or self._sums_2T.device != device:
            with torch.inference_mode(False):
                fresh = torch.zeros(2, self.total, dtype=torch.int64, device=device)
                self._sums_2T = fresh if self._sums_2T is None else fresh.copy_(self._sums_2T)
        return self._sums_2T

    def taking_back(self) -> Callable[[], None]:
        """What takes back all that is added from now on."""
        before = None if self._sums_2T is None else self._sums_2T.clone()

        def take_back() -> None:
            self._sums_2T = before

        return take_back

    def take(self, device: torch.device) -> Tensor:
        """Gives what `sums` does, of this rank, and begins anew."""
        taken = self.sums(device)
        self._sums_2T = None
        return taken


def count_by_hooks(loads: ExpertLoads, found: Sequence[FoundExperts]) -> list[RemovableHandle]:
    """Counts what each module of experts is called with, where no axis does; returns what ends that.

    Args:
        loads: Where to.
        found: The modules, called as ``experts(hidden_ND, index_NK, weights_NK)``.
    """

    def hooked(layer: LayerLoad) -> Any:
        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module.training and layer.counting:
                layer.add_choices(_second(module, args, kwargs))

        return count

    return [each.module.register_forward_pre_hook(hooked(loads[each.name]), with_kwargs=True) for each in found]


def _second(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    given = args if len(args) > 1 else tuple(inspect.signature(module.forward).bind(*args, **kwargs).arguments.values())
    index: Tensor = given[1]
    return index

"""The experts of a module: which submodules hold them, and how they compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from torch import Tensor, nn

Compute = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""``(module, rows_SD, counts_M) -> (S, D)``: what the M experts that the module's present weights are make of rows sorted by expert."""


@dataclass(frozen=True)
class FoundExperts:
    """A submodule that holds all experts of a layer, called as ``experts(hidden_ND, index_NK, weights_NK) -> (N, D)``.

    Attributes:
        name: Its name in the whole module.
        module: Itself.
        count: Experts, E.
        top_k: Experts that each token is sent to, if that is known beforehand.
        stacked: Names of its parameters whose first dimension goes over the experts. It has no others.
        compute: What it computes, given rows sorted by expert; without the weights of the sum.
        tensor_dims: The dimension along which each stacked parameter may be cut over ranks that add up what their parts compute; empty where
            it may not. ``gate_up_proj`` has two halves, each of which is cut.
        halves: Those parameters whose rows along that dimension are two halves, one after the other.
        may_draw: Whether it may draw random numbers, as code of a user's own may.
    """

    name: str
    module: nn.Module
    count: int
    top_k: int | None
    stacked: tuple[str, ...]
    compute: Compute
    tensor_dims: Mapping[str, int] = field(default_factory=dict)
    halves: frozenset[str] = frozenset()
    may_draw: bool = False

    def without_values(self) -> Self:
        """The same of a module that has nothing but the stacked weights, on the meta device."""
        twin = nn.Module()
        for key in self.stacked:
            weight: nn.Parameter = getattr(self.module, key)
            twin.register_parameter(key, nn.Parameter(weight.detach().to("meta"), weight.requires_grad))
        return replace(self, module=twin)

"""Attention over a sequence that no rank holds whole: what every method offers, and which there are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lightning_5d.context_parallel.cut import SequenceCut
from lightning_5d.context_parallel.masks import AttentionMask
from lightning_5d.data_parallel.traffic import Traffic

if TYPE_CHECKING:
    from lightning_5d.mesh import ParallelMesh

Method = Literal["ring", "ulysses", "all_gather"]
METHODS: tuple[Method, ...] = ("ring", "ulysses", "all_gather")


class ContextAttention(ABC):
    """Attention whose queries, keys and values are cut along the sequence; all ranks of the axis call it together.

    Attributes:
        traffic: What was sent.
    """

    traffic: Traffic

    @abstractmethod
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, cut: SequenceCut, scale: float | None = None
    ) -> Tensor:
        """Softmax attention, with a graph.

        Args:
            q: (B, H, s, D), this rank's tokens of all sequences as `cut` says.
            k: (B, K, s, D); K divides H, key and value head i serves query heads i*H/K and on.
            v: (B, K, s, D).
            mask: What queries see. Padding past ``cut.length`` is seen by no query that is not padding itself.
            cut: Which tokens this rank holds.
            scale: Of the scores; 1/sqrt(D) if ``None``.

        Returns:
            (B, H, s, D), in the dtype of `q`. Rows of queries that may see nothing are zero, and give no gradient.
        """

    def memory(self) -> Iterable[Tensor]:
        """What is kept between calls, whole."""
        return ()

    def mapped(self) -> Iterable[Tensor]:
        """The memory of other ranks that this one reads in place, whole."""
        return ()

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Gives back what it holds."""


def open_attention(method: Method, ulysses: int, mesh: ParallelMesh) -> ContextAttention:
    """The attention of a method over the ranks of ``cp``; all ranks of the world call it together.

    Args:
        method: ``"ring"``, ``"ulysses"`` or ``"all_gather"``.
        ulysses: Neighbours that exchange heads inside each place of a ring (method ``"ring"``).
        mesh: The ranks by axis.
    """
    from lightning_5d.context_parallel.all_gather import AllGatherAttention
    from lightning_5d.context_parallel.mixture import MixedAttention
    from lightning_5d.context_parallel.ring import RingAttention
    from lightning_5d.context_parallel.ulysses import UlyssesAttention

    group, device = mesh.line("cp"), mesh.device
    if method == "all_gather":
        return AllGatherAttention(group, device)
    if method == "ulysses":
        return UlyssesAttention(group, device)
    return RingAttention(group, device) if ulysses == 1 else MixedAttention(group, device, ulysses)


def default_scale(head_size: int, scale: float | None) -> float:
    """The scale of scores that `torch.nn.functional.scaled_dot_product_attention` takes."""
    return head_size**-0.5 if scale is None else scale


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Joins of partial results and sums of gradients are made in this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32

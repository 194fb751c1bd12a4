"""A ring of places with neighbours in each: heads are shared inside a place, keys and values travel between places.

Neighbours first exchange heads, as in Ulysses: each then has all tokens of its place and a share of the heads. Ranks at the same position
of all places form a ring for those heads. So fewer ranks need to share heads than with Ulysses alone, and the ring has fewer hops,
between nodes, say, while heads are exchanged inside of them.

Source: Fang and Zhao, "USP: A Unified Sequence Parallelism Approach" (2024).
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_5d.context_parallel.attention import ContextAttention
from lightning_5d.context_parallel.cut import SequenceCut
from lightning_5d.context_parallel.inputs import check_inputs
from lightning_5d.context_parallel.masks import AttentionMask
from lightning_5d.context_parallel.ring import RingAttention
from lightning_5d.context_parallel.ulysses import SharedHeads
from lightning_5d.data_parallel.transports import timeout_s_of
from lightning_5d.mesh import nearest_divisor


class MixedAttention(ContextAttention):
    """Ulysses among `ulysses` neighbours, a ring over places outside.

    Args:
        group: The ranks, place after place.
        device: Where their tensors are.
        ulysses: Ranks per place.
        shared_memory: CPU ranks of one host read straight from each other's memory.

    Raises:
        ValueError: If `ulysses` does not divide the ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, ulysses: int, *, shared_memory: bool = True
    ) -> None:
        ranks = dist.get_process_group_ranks(group)
        if ulysses < 1 or len(ranks) % ulysses:
            raise ValueError(
                f"ulysses={ulysses} does not divide the {len(ranks)} ranks of the context axis; the nearest number that does is"
                f" {nearest_divisor(len(ranks), ulysses)}."
            )
        self._size, self._neighbours = len(ranks), ulysses
        timeout = timedelta(seconds=timeout_s_of(group, device))
        place, neighbour = divmod(group.rank(), ulysses)
        # First all places, then all rings: no two ranks wait for each other in different groups.
        inner, outer = (
            dist.new_group(members, timeout=timeout, use_local_synchronization=True)
            for members in (ranks[place * ulysses : (place + 1) * ulysses], ranks[neighbour::ulysses])
        )
        self._ring = RingAttention(outer, device, shared_memory=shared_memory)
        self.traffic = self._ring.traffic
        self._heads = SharedHeads(inner, device, self.traffic, shared_memory=shared_memory)

    @override
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, cut: SequenceCut, scale: float | None = None
    ) -> Tensor:
        check_inputs(q, k, v, cut, self._size)
        if cut.ulysses != self._neighbours:
            raise ValueError(
                f"The sequence is cut for {cut.ulysses} neighbours in each place of the ring; here they are {self._neighbours}."
            )
        # What neighbours hold, one after the other, is their place's share in the order of positions.
        spans = [((start, start + cut.local),) for start in range(0, cut.ulysses * cut.local, cut.local)]
        q, k, v = self._heads.take(q, k, v, spans)
        out = self._ring(q, k, v, mask, cut.of_places, scale)
        return self._heads.give_back(out, spans)

    @override
    def memory(self) -> Iterable[Tensor]:
        return chain(self._heads.memory(), self._ring.memory())

    @override
    def mapped(self) -> Iterable[Tensor]:
        return chain(self._heads.mapped(), self._ring.mapped())

    @override
    def close(self) -> None:
        self._heads.close()
        self._ring.close()

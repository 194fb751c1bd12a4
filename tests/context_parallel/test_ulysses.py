"""Ulysses equals attention of one process, whatever the mask, the heads and the order of tokens."""

import pytest
import torch
import torch.distributed as dist

from lightning_5d.context_parallel.cut import Balance, SequenceCut
from lightning_5d.context_parallel.ulysses import UlyssesAttention
from tests.context_parallel.dense import MASKS, Case, differences, of_a_rank
from tests.ranks.pool import RankPool

CASES = [
    *(Case(mask, 24) for mask in MASKS),
    *(Case(mask, 21, kv=2) for mask in MASKS),
    Case("causal", 37, heads=8, kv=1),
    Case("everything", 37, heads=8, kv=2),
    Case("causal", 5, heads=12, kv=3),  # 4 ranks: 3 query heads each, of one group or of two
    Case("causal", 3, heads=12, kv=6),  # a rank may have no token
]


def _errors(rank: int, shared_memory: bool) -> list[tuple[str, float]]:
    attention = UlyssesAttention(dist.group.WORLD, torch.device("cpu"), shared_memory=shared_memory)
    found = []
    for case in CASES:
        for balance, neighbours in (("zigzag", 1), ("contiguous", 1), ("zigzag", dist.get_world_size())):
            cut = SequenceCut(case.length, dist.get_world_size(), balance, neighbours)
            errors = differences(of_a_rank(attention, case, cut, rank), case, cut, rank)
            found.append((f"{case} {balance}", max(errors)))
    attention.close()
    return found


@pytest.mark.parametrize(("size", "shared_memory"), [(2, True), (4, True), (2, False), (4, False)])
def test_outputs_and_gradients_are_those_of_one_process(ranks: RankPool, size: int, shared_memory: bool) -> None:
    for found in ranks(size, _errors, shared_memory, backend="gloo", timeout=40):
        assert len(found) == 3 * len(CASES)
        for name, error in found:
            assert error < 1e-5, name

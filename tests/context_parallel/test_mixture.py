"""Ulysses inside of places and a ring over them equal attention of one process."""

import pytest
import torch
import torch.distributed as dist

from lightning_5d.context_parallel.cut import Balance, SequenceCut
from lightning_5d.context_parallel.mixture import MixedAttention
from tests.context_parallel.dense import MASKS, Case, differences, of_a_rank, of_one_process
from tests.ranks.pool import RankPool

CASES = [
    *(Case(mask, 24) for mask in MASKS),
    *(Case(mask, 21, kv=2) for mask in MASKS),
    Case("everything", 37, heads=6, kv=1),
    Case("causal", 3),  # a rank may have no token
]
BALANCES: tuple[Balance, ...] = ("zigzag", "contiguous")


def _errors(rank: int, ulysses: int, shared_memory: bool) -> list[tuple[str, float]]:
    attention = MixedAttention(dist.group.WORLD, torch.device("cpu"), ulysses, shared_memory=shared_memory)
    found = []
    for case in CASES:
        for balance in BALANCES:
            cut = SequenceCut(case.length, dist.get_world_size(), balance, ulysses)
            errors = differences(of_a_rank(attention, case, cut, rank), case, cut, rank)
            found.append((f"{case} {balance}", max(errors)))
    attention.close()
    return found


@pytest.mark.parametrize(("size", "ulysses", "shared_memory"), [(4, 2, True), (4, 2, False), (2, 2, True)])
def test_outputs_and_gradients_are_those_of_one_process(
    ranks: RankPool, size: int, ulysses: int, shared_memory: bool
) -> None:
    for found in ranks(size, _errors, ulysses, shared_memory, backend="gloo", timeout=40):
        assert len(found) == len(BALANCES) * len(CASES)
        for name, error in found:
            assert error < 1e-5, name


LARGE = Case("causal", 256, kv=2, size=32, dtype=torch.bfloat16, times=30.0)


def _errors_of_large_scores(rank: int) -> list[float]:
    attention = MixedAttention(dist.group.WORLD, torch.device("cpu"), 2)
    cut = SequenceCut(LARGE.length, 4, ulysses=2)
    return differences(of_a_rank(attention, LARGE, cut, rank), LARGE, cut, rank)


def test_large_scores_in_16_bits_are_as_exact_as_in_one_process(ranks: RankPool) -> None:
    """Trap 41."""
    alone = differences(of_one_process(LARGE, torch.bfloat16), LARGE, SequenceCut(LARGE.length, 1), 0)
    found = [max(errors) for errors in zip(*ranks(4, _errors_of_large_scores, backend="gloo"), strict=True)]
    for name, once, here in zip("oqkv", alone, found, strict=True):
        assert here < 2 * once, name


def _traffic(rank: int) -> dict[str, int]:
    attention = MixedAttention(dist.group.WORLD, torch.device("cpu"), 2)
    case, cut = Case("causal", 32, heads=4, kv=2), SequenceCut(32, 4, ulysses=2)
    q, k, v = (cut.part(x, 2, rank) for x in case.inputs()[:3])
    attention(q, k, v, case.attention_mask(), cut)
    return attention.traffic.bytes


def test_traffic_is_that_of_ulysses_inside_and_of_a_ring_of_fewer_heads_outside(ranks: RankPool) -> None:
    token = 2 * 8 * 4  # of one head: sequences, head size, bytes
    for rank, sent in enumerate(ranks(4, _traffic, backend="gloo")):
        assert sent["all_to_all"] == 8 * token * (4 + 2 * 2) + 8 * token * 4
        # Of place 0 the other one sees the first half; of place 1 the other one's second half sees all.
        assert sent["send"] == 2 * 1 * token * (8 if rank < 2 else 16)


def test_places_that_the_ranks_do_not_fill_are_refused(ranks: RankPool) -> None:
    assert (
        ranks(2, _refusal, backend="gloo")
        == ["ulysses=3 does not divide the 2 ranks of the context axis; the nearest number that does is 2."] * 2
    )


def _refusal(rank: int) -> str:
    with pytest.raises(ValueError) as error:
        MixedAttention(dist.group.WORLD, torch.device("cpu"), 3)
    return str(error.value)

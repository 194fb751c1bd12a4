"""Attention over gathered keys and values equals that of one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from lightning_5d.context_parallel import all_gather
from lightning_5d.context_parallel.all_gather import AllGatherAttention
from lightning_5d.context_parallel.cut import Balance, SequenceCut
from tests.context_parallel.dense import MASKS, SIZES, Case, differences, of_a_rank, of_one_process, opened
from tests.ranks.pool import RankPool

CASES = [
    *(Case(mask, 24) for mask in MASKS),
    *(Case(mask, 21, kv=2) for mask in MASKS),
    Case("causal", 37, heads=6, kv=1),
    Case("everything", 37, heads=6, kv=2),
    Case("causal", 3),  # a rank may have no token
]
BALANCES: tuple[Balance, ...] = ("zigzag", "contiguous")


_open = partial(opened, all_gather, AllGatherAttention)


def _errors(rank: int, kind: str) -> list[tuple[str, float]]:
    attention = _open(kind)
    found = []
    for case in CASES:
        for balance in BALANCES:
            cut = SequenceCut(case.length, dist.get_world_size(), balance)
            errors = differences(of_a_rank(attention, case, cut, rank), case, cut, rank)
            found.append((f"{case} {balance}", max(errors)))
    attention.close()
    return found


@pytest.mark.parametrize(("size", "kind"), SIZES)
def test_outputs_and_gradients_are_those_of_one_process(ranks: RankPool, size: int, kind: str) -> None:
    for found in ranks(size, _errors, kind, backend="gloo", timeout=40):
        assert len(found) == len(BALANCES) * len(CASES)
        for name, error in found:
            assert error < 1e-5, name


LARGE = [
    Case(mask, 256, kv=2, size=32, dtype=torch.bfloat16, times=times)
    for mask in ("causal", "full")
    for times in (1.0, 30.0)
]


def _errors_of_large_scores(rank: int) -> list[list[float]]:
    attention = _open("shared memory")
    cuts = [SequenceCut(case.length, dist.get_world_size()) for case in LARGE]
    return [
        differences(of_a_rank(attention, case, cut, rank), case, cut, rank)
        for case, cut in zip(LARGE, cuts, strict=True)
    ]


def test_large_scores_in_16_bits_are_as_exact_as_in_one_process(ranks: RankPool) -> None:
    """Trap 41."""
    results = ranks(4, _errors_of_large_scores, backend="gloo")
    for index, case in enumerate(LARGE):
        alone = differences(of_one_process(case, torch.bfloat16), case, SequenceCut(case.length, 1), 0)
        found = [max(errors) for errors in zip(*(result[index] for result in results), strict=True)]
        for name, once, here in zip("oqkv", alone, found, strict=True):
            assert here < 2 * once, (name, case)


def _traffic(rank: int) -> list[tuple[int, int, dict[str, int]]]:
    attention = _open("shared memory")
    case = Case("causal", 24, heads=8, kv=2)
    cut = SequenceCut(case.length, dist.get_world_size())
    q, k, v = (cut.part(x, 2, rank).requires_grad_() for x in case.inputs()[:3])
    found = []
    for backward in (False, True):
        attention.traffic.reset()
        out = attention(q, k, v, case.attention_mask(), cut)
        if backward:
            out.sum().backward()
        found.append((attention.traffic.volume, dict(attention.traffic.calls)))
    return [(volume, {kind: count for kind, count in calls.items() if count}) for volume, calls in found]


def test_traffic_is_a_gather_in_forward_and_a_gather_and_a_sum_in_backward(ranks: RankPool) -> None:
    whole = 2 * 2 * 2 * 24 * 8 * 4  # keys and values, sequences, heads, tokens, head size, bytes
    expected = [(whole, {"all_gather": 1}), (3 * whole, {"all_gather": 2, "reduce_scatter": 1})]
    assert ranks(4, _traffic, backend="gloo") == [expected] * 4

"""Ulysses equals attention of one process, whatever the mask, the heads and the order of tokens."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from lightning_5d.context_parallel import ulysses
from lightning_5d.context_parallel.cut import Balance, SequenceCut
from lightning_5d.context_parallel.heads import heads_problem
from lightning_5d.context_parallel.masks import AttentionMask
from lightning_5d.context_parallel.ulysses import UlyssesAttention
from tests.context_parallel.dense import MASKS, SIZES, Case, differences, of_a_rank, of_one_process, opened
from tests.ranks.pool import RankPool

CASES = [
    *(Case(mask, 24) for mask in MASKS),
    *(Case(mask, 21, kv=2) for mask in MASKS),
    Case("causal", 37, heads=8, kv=1),
    Case("everything", 37, heads=8, kv=2),
    Case("causal", 5, heads=12, kv=3),  # 4 ranks: 3 query heads each, of one group or of two
    Case("causal", 3, heads=12, kv=6),  # a rank may have no token
]


CUTS: list[tuple[Balance, int]] = [("zigzag", 1), ("contiguous", 1), ("zigzag", 0)]


_open = partial(opened, ulysses, UlyssesAttention)


def _errors(rank: int, kind: str) -> list[tuple[str, float]]:
    attention = _open(kind)
    found = []
    for case in CASES:
        for balance, neighbours in CUTS:
            cut = SequenceCut(case.length, dist.get_world_size(), balance, neighbours or dist.get_world_size())
            errors = differences(of_a_rank(attention, case, cut, rank), case, cut, rank)
            found.append((f"{case} {balance} {neighbours}", max(errors)))
    attention.close()
    return found


@pytest.mark.parametrize(("size", "kind"), SIZES)
def test_outputs_and_gradients_are_those_of_one_process(ranks: RankPool, size: int, kind: str) -> None:
    for found in ranks(size, _errors, kind, backend="gloo", timeout=40):
        assert len(found) == len(CUTS) * len(CASES)
        for name, error in found:
            assert error < 1e-5, name


LARGE = [Case("causal", 256, kv=2, size=32, dtype=torch.bfloat16, times=times) for times in (1.0, 30.0)]


def _errors_of_large_scores(rank: int) -> list[list[float]]:
    attention = _open("shared memory")
    cuts = [SequenceCut(case.length, dist.get_world_size(), "zigzag", 1) for case in LARGE]
    return [
        differences(of_a_rank(attention, case, cut, rank), case, cut, rank)
        for case, cut in zip(LARGE, cuts, strict=True)
    ]


def test_large_scores_in_16_bits_are_as_exact_as_in_one_process(ranks: RankPool) -> None:
    """Trap 41."""
    results = ranks(4, _errors_of_large_scores, backend="gloo")
    for index, case in enumerate(LARGE):
        whole = SequenceCut(case.length, 1)
        alone = differences(of_one_process(case, torch.bfloat16), case, whole, 0)
        for name, once, found in zip(
            "oqkv", alone, zip(*(result[index] for result in results), strict=True), strict=True
        ):
            assert max(found) < 2 * once, (name, case.times)


def _traffic(rank: int, heads: int, kv: int) -> tuple[int, int, int]:
    attention = _open("shared memory")
    case = Case("causal", 24, heads=heads, kv=kv)
    cut = SequenceCut(case.length, dist.get_world_size())
    q, k, v = (cut.part(x, 2, rank).requires_grad_() for x in case.inputs()[:3])
    out = attention(q, k, v, case.attention_mask(), cut)
    forward = attention.traffic.volume
    out.sum().backward()
    return forward, attention.traffic.volume - forward, attention.traffic.calls["all_to_all"]


@pytest.mark.parametrize(("heads", "kv", "sent"), [(8, 8, 8), (8, 4, 4), (8, 2, 4), (8, 1, 4), (12, 3, 12)])
def test_traffic_is_two_exchanges_each_way_with_repeated_heads_only_where_ranks_share_them(
    ranks: RankPool, heads: int, kv: int, sent: int
) -> None:
    tokens = 2 * (24 // 4) * 8 * 4  # sequences, tokens of a rank, head size, bytes
    expected = tokens * (heads + 2 * sent) + tokens * heads
    assert ranks(4, _traffic, heads, kv, backend="gloo") == [(expected, expected, 4)] * 4


def _refusals(rank: int) -> list[str]:
    attention = _open("shared memory")
    x = torch.zeros(1, 6, 4, 8)
    calls = [
        (x, x, SequenceCut(16, 4)),
        (x, x[:, :, :3], SequenceCut(8, 2)),
        (x, x[:, :4], SequenceCut(8, 2)),
        (x[:, :3], x[:, :3], SequenceCut(8, 2)),
    ]
    found = []
    for q, k, cut in calls:
        with pytest.raises(ValueError) as error:
            attention(q, k, k, AttentionMask(), cut)
        found.append(str(error.value))
    return found


def test_calls_that_do_not_fit_are_refused_with_both_numbers(ranks: RankPool) -> None:
    words = [
        "cut for 4 ranks; attention is over 2",
        "4, 3 and 3 tokens; each rank holds 4",
        "(1, 6, 4, 8)",
        "3 query heads",
    ]
    for found in ranks(2, _refusals, backend="gloo"):
        assert all(word in error for word, error in zip(words, found, strict=True)), found


def _nothing(rank: int) -> tuple[int, ...]:
    attention = _open("shared memory")
    q = torch.empty(0, 4, 2, 8, requires_grad=True)
    out = attention(q, q, q, AttentionMask(), SequenceCut(4, dist.get_world_size()))
    out.sum().backward()
    return tuple(out.shape)


def test_a_batch_without_sequences(ranks: RankPool) -> None:
    assert ranks(2, _nothing, backend="gloo") == [(0, 4, 2, 8)] * 2


@pytest.mark.parametrize(
    ("heads", "kv", "size", "words"),
    [
        (6, 2, 4, ["over 4 ranks", "6 query heads", "is 3;"]),
        (8, 3, 2, ["3 key and value heads", "8 query heads", "is 2."]),
    ],
)
def test_heads_that_ranks_cannot_share_are_refused_with_the_nearest_number(
    heads: int, kv: int, size: int, words: list[str]
) -> None:
    problem = str(heads_problem(heads, kv, size))
    assert all(word in problem for word in words), problem


def test_heads_that_ranks_can_share_are_no_problem() -> None:
    assert [heads_problem(12, kv, ranks) for kv in (1, 2, 3, 4, 6, 12) for ranks in (1, 2, 3, 4, 6, 12)] == [None] * 36

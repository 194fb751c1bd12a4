"""What the axis says about sequences, against counts of every pair and every row."""

import pytest

from lightning_5d.context_parallel.cut import SequenceCut
from lightning_5d.context_parallel.report import AttentionShape, causal_work, describe_context, sent_by_layer

SHAPE = AttentionShape(heads=8, kv_heads=2, head_size=16)


@pytest.mark.parametrize("cut", [SequenceCut(64, 4), SequenceCut(64, 4, "contiguous"), SequenceCut(48, 4, "zigzag", 2)])
def test_causal_work_is_the_pairs_that_each_place_of_the_ring_computes(cut):
    pairs = [0] * cut.places
    for rank in range(cut.size):
        pairs[rank // cut.ulysses] += sum(int(position) + 1 for position in cut.positions(rank))
    mean = sum(pairs) / cut.places
    assert causal_work(cut) == pytest.approx([pairs[rank // cut.ulysses] / mean for rank in range(cut.size)])


def test_zigzag_is_equal_work_and_contiguous_is_not():
    assert causal_work(SequenceCut(4096, 4)) == [1.0] * 4
    assert causal_work(SequenceCut(4096, 2, "contiguous")) == pytest.approx([0.5, 1.5], rel=1e-3)


@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_ring_sends_the_rows_that_others_see(balance, causal):
    cut = SequenceCut(64, 4, balance)
    positions = [cut.positions(rank) for rank in range(cut.size)]
    rows = sum(
        int((positions[owner] <= positions[reader].max()).sum()) if causal else cut.local
        for reader in range(cut.size)
        for owner in range(cut.size)
        if reader != owner
    )
    forward, backward = sent_by_layer("ring", cut, SHAPE, causal=causal)
    assert forward == rows * 2 * SHAPE.kv_heads * SHAPE.head_size * 4 / cut.size
    assert backward == 2 * forward


def test_ulysses_sends_all_but_its_own_share_of_queries_keys_values_and_output():
    cut = SequenceCut(64, 4, "contiguous", 4)
    # 16 tokens; 8 heads of queries and of the output, and 2 of keys and values, each to two ranks.
    assert sent_by_layer("ulysses", cut, SHAPE) == (16 * (8 + 8 + 2 * 4) * 16 * 4 * 3 // 4,) * 2


def test_lines_for_people():
    text = describe_context("ring", SequenceCut(61, 2, "contiguous"), SHAPE).splitlines()
    assert text[0] == "Context axis of 2 (ring, contiguous): of 61 tokens, padded to 62, each rank holds 31."
    assert text[2:4] == ["rank 0  0-30       0.51", "rank 1  31-61      1.49"]
    many = describe_context("all_gather", SequenceCut(4096, 64), causal=False).splitlines()
    assert [line.split("  ")[0] for line in many[2:]] == ["rank 0", "rank 1", "...", "rank 63"]

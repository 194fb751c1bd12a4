"""Which tokens each rank holds: every token once, padding at the end, zigzag in equal work."""

import pytest
import torch

from lightning_5d.context_parallel.cut import SequenceCut

CUTS = [
    SequenceCut(length, size, balance, ulysses)
    for length in (5, 8, 13, 24, 31)
    for size, ulysses in ((1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (4, 4), (6, 3))
    for balance in ("zigzag", "contiguous")
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_token_is_held_once_and_comes_back_in_order(cut: SequenceCut) -> None:
    held = torch.cat([cut.positions(rank) for rank in range(cut.size)])
    assert held.sort().values.tolist() == list(range(cut.padded))
    assert {len(cut.positions(rank)) for rank in range(cut.size)} == {cut.local}
    assert sum(cut.held(rank) for rank in range(cut.size)) == cut.length
    assert 0 <= cut.padded - cut.length < cut.multiple
    whole = torch.arange(3 * cut.length).view(3, cut.length)
    parts = [cut.part(whole, 1, rank, fill=-1) for rank in range(cut.size)]
    assert sum(int((part == -1).sum()) for part in parts) == 3 * (cut.padded - cut.length)
    assert torch.equal(cut.join(parts, 1), whole)


@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut.ulysses > 1], ids=str)
def test_neighbours_hold_their_places_share_in_its_order(cut: SequenceCut) -> None:
    for place in range(cut.places):
        share = torch.cat([torch.arange(start, stop) for start, stop in cut.place_spans(place)])
        ranks = range(place * cut.ulysses, (place + 1) * cut.ulysses)
        assert torch.cat([cut.positions(rank) for rank in ranks]).tolist() == share.tolist()


@pytest.mark.parametrize(("length", "size"), [(64, 2), (64, 4), (96, 6)])
def test_zigzag_gives_causal_attention_of_equal_work(length: int, size: int) -> None:
    work = [int((SequenceCut(length, size).positions(rank) + 1).sum()) for rank in range(size)]
    uneven = [int((SequenceCut(length, size, "contiguous").positions(rank) + 1).sum()) for rank in range(size)]
    assert max(work) == min(work)
    assert max(uneven) > 2 * min(uneven)


def test_an_example() -> None:
    assert SequenceCut(8, 2).positions(0).tolist() == [0, 1, 6, 7]
    assert SequenceCut(7, 2).positions(1).tolist() == [2, 3, 4, 5]
    assert SequenceCut(7, 2).held(0) == 3

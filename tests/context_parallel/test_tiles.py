"""Tiles hold every pair of a query and a key that counts exactly once, and little more."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from lightning_5d.context_parallel import tiles
from lightning_5d.context_parallel.cut import SequenceCut
from lightning_5d.context_parallel.masks import AttentionMask
from lightning_5d.context_parallel.tiles import Plan, plan, tile_mask
from tests.context_parallel.test_ring import masks, seen

CPU = torch.device("cpu")


def computed(mask: AttentionMask, cut: SequenceCut, batch: int) -> Tensor:
    """How often each pair of positions is computed by all places together, (B, padded, padded)."""
    times = torch.zeros(batch, cut.padded, cut.padded, dtype=torch.int64)
    for place, owner in itertools.product(range(cut.places), repeat=2):
        for tile in plan(mask, cut, place).tiles[owner]:
            q = tiles.place_positions(cut, place, tile.queries)
            k = tiles.place_positions(cut, owner, tile.keys)
            if tile.kind == "masked":
                pairs = tile_mask(mask, cut, tile, place, owner, CPU)[:, 0].expand(batch, -1, -1)
            else:
                pairs = torch.ones(batch, len(q), len(k), dtype=torch.bool)
                if tile.kind == "causal":
                    assert torch.equal(q, k)
                    pairs = pairs.tril()
            times[:, q[:, None], k[None]] += pairs
    return times


@pytest.mark.parametrize("piece", [512, 3])
@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
def test_every_pair_that_counts_is_computed_once(monkeypatch: pytest.MonkeyPatch, piece: int, balance: str) -> None:
    monkeypatch.setattr(tiles, "_PIECE", piece)
    for length, (size, ulysses) in itertools.product((10, 23, 32), ((1, 1), (2, 1), (4, 1), (4, 2))):
        cut = SequenceCut(length, size, balance, ulysses)  # type: ignore[arg-type]
        for name, mask in masks(length).items():
            found = computed(mask, cut, 2)[:, :length]
            expected = seen(mask, length)[:, 0].expand(2, -1, -1).long()
            assert torch.equal(found[:, :, :length], expected), (name, cut)
            # No query that is not padding sees padding.
            assert not found[:, :, length:].any(), (name, cut)


@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
@pytest.mark.parametrize("piece", [512, 3])
def test_what_one_place_needs_another_serves(monkeypatch: pytest.MonkeyPatch, piece: int, balance: str) -> None:
    monkeypatch.setattr(tiles, "_PIECE", piece)
    cut = SequenceCut(23, 4, balance)  # type: ignore[arg-type]
    for mask in masks(23).values():
        plans = [plan(mask, cut, place) for place in range(4)]
        for place, owner in itertools.product(range(4), repeat=2):
            assert plans[place].needs[owner] == plans[owner].serves[place]
            for tile in plans[place].tiles[owner]:
                start, stop = plans[place].needs[owner]  # type: ignore[misc]
                assert start <= tile.keys[0] < tile.keys[1] <= stop


def works(mask: AttentionMask, cut: SequenceCut) -> list[int]:
    return [plan(mask, cut, place).work for place in range(cut.places)]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_causal_work_is_equal_in_zigzag_order_and_a_triangle_in_all(size: int) -> None:
    cut = SequenceCut(4096, size)
    zigzag = works(AttentionMask(causal=True), cut)
    assert max(zigzag) <= 1.02 * min(zigzag)
    assert sum(zigzag) == 4096 * 4097 // 2
    contiguous = works(AttentionMask(causal=True), SequenceCut(4096, size, "contiguous"))
    assert sum(contiguous) == sum(zigzag)
    assert max(contiguous) > 1.49 * max(zigzag)


def test_a_hop_of_a_causal_ring_is_one_call() -> None:
    for size, balance in itertools.product((2, 4), ("zigzag", "contiguous")):
        cut = SequenceCut(64, size, balance)  # type: ignore[arg-type]
        for place in range(size):
            found = plan(AttentionMask(causal=True), cut, place)
            assert all(len(each) <= 1 for each in found.tiles)
            if balance == "contiguous":
                assert [bool(each) for each in found.tiles] == [owner <= place for owner in range(size)]


def test_work_of_a_window_grows_with_the_window() -> None:
    full = sum(works(AttentionMask(causal=True), SequenceCut(16384, 4)))
    window = sum(works(AttentionMask(causal=True, window=512), SequenceCut(16384, 4)))
    assert window < 3 * 16384 * 512 / 2 * 1.1
    assert window < full / 10


def test_short_documents_are_not_compared_with_each_other() -> None:
    documents = torch.arange(16384)[None] // 1024
    cut = SequenceCut(16384, 4)
    packed = [plan(AttentionMask(causal=True, documents=documents), cut, place) for place in range(4)]
    assert sum(each.work for each in packed) < 16384 * 1024 * 0.8
    assert all(tile.kind != "masked" for each in packed for of_owner in each.tiles for tile in of_owner)
    # Each place's spans begin and end with a document, so nothing has to be sent at all.
    assert all(span is None for place, each in enumerate(packed) for o, span in enumerate(each.needs) if o != place)


def test_masks_that_say_nothing_make_the_plan_of_none() -> None:
    cut = SequenceCut(64, 4)
    plain = plan(AttentionMask(causal=True), cut, 1)
    for mask in (
        AttentionMask(causal=True, window=64),
        AttentionMask(causal=True, keys=torch.ones(2, 64, dtype=torch.bool)),
        AttentionMask(causal=True, documents=torch.tensor([[3] * 64, [4] * 64])),
    ):
        assert plan(mask, cut, 1) is plain


def test_a_plan_is_made_once_and_forgotten_with_its_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Plan] = []
    make = tiles._plan
    monkeypatch.setattr(tiles, "_plan", lambda *args, **kwargs: made.append(make(*args, **kwargs)) or made[-1])
    cut, mask = SequenceCut(96, 2), AttentionMask(causal=True, window=4)
    before = len(tiles._of_tokens)
    assert plan(mask, cut, 0) is plan(mask, cut, 0)
    assert plan(mask, cut, 1) is not plan(mask, cut, 0)
    assert len(made) == 2
    del mask
    assert len(tiles._of_tokens) == before


def test_the_mask_of_a_tile_is_as_small_as_the_tile() -> None:
    mask, cut = AttentionMask(causal=True, window=100), SequenceCut(8192, 4)
    for owner, found in enumerate(plan(mask, cut, 2).tiles):
        for tile in found:
            if tile.kind == "masked":
                shape = tile_mask(mask, cut, tile, 2, owner, CPU).shape
                assert shape == (1, 1, tile.queries[1] - tile.queries[0], tile.keys[1] - tile.keys[0])
                assert shape[2] <= 512
                assert shape[3] <= 612

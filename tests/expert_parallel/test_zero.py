"""ZeRO spreads experts over the ranks that hold the same ones, and trains like one process."""

import pytest
import torch

from lightning_5d.data_parallel import ShardOptions
from tests.data_parallel.training import assert_equal_runs
from tests.expert_parallel.mixture import Layout, half, on_ranks_each, one_process

STAGES = range(4)


def _compare(ranks, layouts: list[Layout], tolerance: float = 1e-5) -> None:
    got = ranks(layouts[0].world, on_ranks_each, layouts, timeout=45)
    expected = {}
    for layout, runs in zip(layouts, zip(*got, strict=True), strict=True):
        key = layout.count, layout.mode, layout.accumulation, layout.optimizer
        if key not in expected:
            expected[key] = one_process(layout)
        try:
            assert_equal_runs(list(runs), expected[key], tolerance)
        except AssertionError as error:
            raise AssertionError(f"{layout}: {error}") from error


def test_every_stage_equals_one_process_with_two_ranks_for_each_expert(ranks):
    _compare(ranks, [Layout(ShardOptions(stage), 2, accumulation=2) for stage in STAGES])


def test_it_does_so_with_momentum_replicas_and_ranks_alone_with_their_experts(ranks):
    layouts = []
    for stage in STAGES:
        layouts.append(Layout(ShardOptions(stage), 4, optimizer="SGD"))
        layouts.append(Layout(ShardOptions(stage), 2, (1, 2, 2, 1, 1), optimizer="SGD"))
        layouts.append(Layout(ShardOptions(stage), 1, (1, 2, 2, 1, 1), optimizer="SGD"))
        layouts.append(Layout(ShardOptions(stage), 2, (1, 1, 2, 2, 1), optimizer="SGD"))
    _compare(ranks, layouts)


def test_two_ranks_with_half_of_the_experts_each_equal_one_process(ranks):
    sizes = (1, 1, 2, 1, 1)
    _compare(ranks, [Layout(ShardOptions(stage), 2, sizes, accumulation=2) for stage in STAGES])


@pytest.mark.parametrize("mode", ["experts frozen", "one layer trained", "halves", "skipped"])
def test_frozen_and_skipped_layers_hold_up_nobody(ranks, mode):
    _compare(ranks, [Layout(ShardOptions(stage), 2, mode=mode, accumulation=2) for stage in (0, 2, 3)])


def test_uneven_offloaded_and_messaging_ranks_train_alike(ranks):
    layouts = [
        Layout(ShardOptions(3, offload="optimizer+parameters"), 2),
        Layout(ShardOptions(3, shared_memory=False), 2, mode="skipped"),
        Layout(ShardOptions(2), 2, count=6),  # three experts on two ranks
        Layout(ShardOptions(3), 2, count=2),  # one expert on two ranks
    ]
    _compare(ranks, layouts)


def test_half_precision_divides_as_full_precision_does(ranks):
    layouts = [
        Layout(ShardOptions(stage, half(dtype)), ep, optimizer="SGD")
        for stage in (0, 1, 3)
        for ep in (2, 4)
        for dtype in (torch.bfloat16, torch.float16)
    ]
    _compare(ranks, layouts, tolerance=3e-2)

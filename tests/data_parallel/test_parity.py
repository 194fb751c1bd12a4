"""Every ZeRO stage trains like one process."""

import pytest

from lightning_5d.data_parallel import ShardOptions
from tests.data_parallel.training import Layout, assert_equal_runs, on_ranks_each, one_process

ODD = [
    "AllFrozenButHead",
    "BlocksOwnEverything",
    "Buffered",
    "Checkpointed",
    "CheckpointedInside",
    "Collections",
    "Compiled",
    "DictOutput",
    "Frozen",
    "LastBlockOnOneRank",
    "Nested",
    "NoBlocks",
    "Scalar",
    "SharedBlock",
    "TiedAcrossBlocks",
    "TiedInRoot",
    "TiedWithRoot",
    "TwoDtypes",
    "TwoForwards",
    "UnusedByAll",
    "UsedByOneRank",
]


STAGES = [0, 1, 2, 3]


def _compare(ranks, name: str, size: int, layouts: list[Layout]) -> None:
    got = ranks(size, on_ranks_each, name, size, layouts, timeout=55)
    expected = {accumulation: one_process(name, size, accumulation) for _, _, accumulation in layouts}
    for layout, runs in zip(layouts, zip(*got, strict=True), strict=True):
        try:
            assert_equal_runs(list(runs), expected[layout[2]])
        except AssertionError as error:
            raise AssertionError(f"{layout}: {error}") from error


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_stage_equals_one_process(ranks, size, accumulation):
    _compare(ranks, "Net", size, [(ShardOptions(stage=stage), 1, accumulation) for stage in STAGES])


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("replicate", [2, 4])
def test_every_hybrid_stage_equals_one_process(ranks, replicate, accumulation):
    _compare(ranks, "Net", 4, [(ShardOptions(stage=stage), replicate, accumulation) for stage in STAGES])


@pytest.mark.parametrize("name", ODD)
def test_an_odd_module_equals_one_process_at_every_stage(ranks, name):
    _compare(ranks, name, 2, [(ShardOptions(stage=stage), 1, 2) for stage in STAGES])


@pytest.mark.parametrize("name", ["Net", "UnusedByAll", "UsedByOneRank"])
def test_ranks_that_cannot_share_memory_train_alike(ranks, name):
    _compare(ranks, name, 3, [(ShardOptions(stage=stage, shared_memory=False), 1, 2) for stage in STAGES])

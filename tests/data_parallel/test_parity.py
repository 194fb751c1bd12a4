"""Every ZeRO stage trains like one process."""

import pytest

from lightning_5d.data_parallel import ShardOptions
from tests.data_parallel.training import assert_equal_runs, on_ranks, one_process

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


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_stage_equals_one_process(ranks, size, stage, accumulation):
    got = ranks(size, on_ranks, "Net", size, ShardOptions(stage=stage), 1, accumulation, timeout=40)
    assert_equal_runs(got, one_process("Net", size, accumulation))


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("replicate", [2, 4])
def test_a_hybrid_stage_equals_one_process(ranks, replicate, stage, accumulation):
    got = ranks(4, on_ranks, "Net", 4, ShardOptions(stage=stage), replicate, accumulation, timeout=40)
    assert_equal_runs(got, one_process("Net", 4, accumulation))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ODD)
def test_an_odd_module_equals_one_process(ranks, name, stage):
    got = ranks(2, on_ranks, name, 2, ShardOptions(stage=stage), 1, 2, timeout=40)
    assert_equal_runs(got, one_process(name, 2, 2))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["Net", "UnusedByAll", "UsedByOneRank"])
def test_ranks_that_cannot_share_memory_train_alike(ranks, name, stage):
    got = ranks(3, on_ranks, name, 3, ShardOptions(stage=stage, shared_memory=False), 1, 2, timeout=40)
    assert_equal_runs(got, one_process(name, 3, 2))

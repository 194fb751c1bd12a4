"""What each stage sends is what the table says, exactly."""

import pytest

from lightning_5d.data_parallel import ShardOptions
from tests.data_parallel.training import make, on_ranks

BLOCKS = 3


def _bytes(ranks: int) -> dict[str, int]:
    """Padded bytes of the root's own parameters, of one block, and of everything; plain (not padded) of everything."""
    module = make("Net")

    def padded(params) -> int:
        return sum(-(-p.shape[0] // ranks) * ranks * p[0].numel() * 4 for p in params)

    block = padded(module.blocks[0].parameters())
    total = padded(module.parameters())
    return {"block": block, "root": total - BLOCKS * block, "total": total}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_stage_sends_what_the_table_says(ranks, stage, accumulation):
    size, groups = 2, BLOCKS + 1
    run = ranks(size, on_ranks, "Net", size, ShardOptions(stage=stage), 1, accumulation, 2, False, timeout=40)[0]
    of = _bytes(size)
    expected = {
        0: ({"all_gather": 0, "reduce_scatter": 0, "all_reduce": 1}, None),
        1: ({"all_gather": groups, "reduce_scatter": groups, "all_reduce": 0}, 2 * of["total"]),
        2: (
            {"all_gather": groups, "reduce_scatter": groups * accumulation, "all_reduce": 0},
            (1 + accumulation) * of["total"],
        ),
        # The root's own parameters stay gathered between forward and backward: they are needed again at once.
        3: (
            {
                "all_gather": (groups + BLOCKS) * accumulation,
                "reduce_scatter": groups * accumulation,
                "all_reduce": 0,
            },
            (3 * BLOCKS * of["block"] + 2 * of["root"]) * accumulation,
        ),
    }[stage]
    if stage == 0:
        plain = sum(p.numel() * 4 for p in make("Net").parameters())
        expected = (expected[0], 2 * (plain + plain // 4 % size * 4))
    for calls, volume in zip(run.calls, run.volumes, strict=True):
        assert calls == expected[0]
        assert volume == expected[1]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_hybrid_stage_gathers_inside_its_shard_group_only(ranks, stage):
    run = ranks(4, on_ranks, "Net", 4, ShardOptions(stage=stage), 2, 1, 2, False, timeout=40)[0]
    assert run.calls[0]["reduce_scatter"] == run.calls[0]["all_reduce"] == BLOCKS + 1
    # All-reduces are of shards: half of what is scattered over the two ranks of a shard group.
    of = _bytes(2)
    gathered = of["total"] + (BLOCKS * of["block"] if stage == 3 else 0)
    assert run.volumes[0] == gathered + of["total"] + 2 * (of["total"] // 2)


def test_parameters_that_nobody_uses_cost_no_reduction(ranks):
    run = ranks(2, on_ranks, "UnusedByAll", 2, ShardOptions(stage=2), 1, 1, 2, False, timeout=40)[0]
    assert run.calls[0]["reduce_scatter"] == BLOCKS  # the root and two of three blocks

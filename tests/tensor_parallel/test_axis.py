"""The tensor axis gives exact values, the same bits on every rank, and never waits for the dead."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_5d.tensor_parallel.axis import CollectiveAxis, TensorAxis, open_axis
from lightning_5d.tensor_parallel.host_axis import HostAxis
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.ranks.words import hear, say

KINDS = ["shared memory", "gloo"]
LARGE = (40, 30, 25)  # more than 64 KiB


def _open(kind: str) -> TensorAxis:
    axis = open_axis(dist.group.WORLD, shared_memory=kind == "shared memory")  # type: ignore[arg-type]
    assert type(axis) is (HostAxis if kind == "shared memory" else CollectiveAxis)
    return axis


def _input(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(rank)).mul(8)
    return x.round().to(dtype) if dtype in (torch.int64, torch.bfloat16, torch.float16) else x.to(dtype)


def _values(rank: int, kind: str, size: int) -> None:
    axis = _open(kind)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64):
        for shape in ((size,), (3, 2 * size, 5), (1, size, 1), tuple(n * size for n in LARGE)):
            inputs = [_input(r, shape, dtype) for r in range(size)]
            before, x = inputs[rank].clone(), inputs[rank]
            total = sum(part.double() for part in inputs).to(dtype)  # type: ignore[union-attr,attr-defined]
            tolerance = 1e-6 if dtype == torch.float32 else 0.0  # small whole numbers are exact in 16 bits
            torch.testing.assert_close(axis.sum(x), total, rtol=tolerance, atol=tolerance * 100)
            assert torch.equal(axis.sum(x, "max"), torch.stack(inputs).amax(0))
            for dim in range(-1, len(shape)):
                assert torch.equal(axis.gather(x, dim), torch.cat(inputs, dim))
                if shape[dim] % size == 0:
                    mine = total.chunk(size, dim)[rank]
                    torch.testing.assert_close(
                        axis.scatter_sum(x, dim), mine.contiguous(), rtol=tolerance, atol=tolerance * 100
                    )
            assert torch.equal(x, before)
    assert torch.equal(axis.sum(torch.tensor(float(rank))), torch.tensor(sum(map(float, range(size)))))
    nothing = torch.empty(0, 2 * size)
    assert axis.sum(nothing).shape == (0, 2 * size)
    assert axis.gather(nothing, 1).shape == (0, 2 * size**2)
    assert axis.scatter_sum(nothing, 1).shape == (0, 2)
    turned = _input(rank, (4, 6), torch.float32).t()[::2]
    assert torch.equal(
        axis.gather(turned, 0), torch.cat([_input(r, (4, 6), torch.float32).t()[::2] for r in range(size)])
    )
    axis.close()


@pytest.mark.parametrize(("kind", "size"), [("shared memory", 2), ("shared memory", 4), ("gloo", 3)])
def test_values(ranks: RankPool, kind: str, size: int) -> None:
    ranks(size, _values, kind, size, timeout=40)


def _bits(rank: int, shape: tuple[int, ...]) -> tuple[bytes, float]:
    axis = _open("shared memory")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
    fine = axis.sum(torch.tensor([256.0, 1.0, 1.0, 2.0][rank], dtype=torch.bfloat16))
    result = axis.sum(x).numpy().tobytes(), float(fine)
    axis.close()
    return result


@pytest.mark.parametrize("shape", [(7, 3), (160, 300)])
def test_sums_have_the_same_bits_on_every_rank_and_16_bits_are_added_up_in_32(
    ranks: RankPool, shape: tuple[int, ...]
) -> None:
    results = ranks(4, _bits, shape)
    assert len({bits for bits, _ in results}) == 1
    parts = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    assert results[0][0] == (((parts[0] + parts[1]) + parts[2]) + parts[3]).numpy().tobytes()
    assert [fine for _, fine in results] == [260.0] * 4  # 258 if every sum were rounded to bfloat16


def _many_under_way(rank: int, size: int) -> int:
    """Waits come in another order than starts, on the first ranks much later, and results are written to."""
    axis = _open("shared memory")
    for step in range(20):
        time.sleep(0.001 * rank)
        x = axis.empty(LARGE, torch.empty(0)).fill_(step + rank)
        starts = [
            axis.start_sum(x),
            axis.start_gather(x[:2], 0),
            axis.start_scatter_sum(torch.full((size, 9), float(rank)), 0),
            axis.start_sum(torch.full((3,), float(step * rank))),
        ]
        del x
        scaled, scattered, gathered, summed = (starts[place].wait() for place in (3, 2, 1, 0))
        ranks = sum(range(size))
        assert summed.eq(step * size + ranks).all()
        assert scattered.eq(ranks).all()
        assert scaled.eq(step * ranks).all()
        assert [float(part.mean()) for part in gathered.chunk(size)] == [step + r for r in range(size)]
        for result in (summed, gathered, scattered, scaled):
            result.fill_(-1.0)
    dist.barrier()
    blocks = len(axis.memory())
    axis.close()
    return blocks


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_under_way_do_not_meet_and_their_memory_is_used_again(ranks: RankPool, size: int) -> None:
    assert max(ranks(size, _many_under_way, size)) <= 16


def _traffic(rank: int, kind: str) -> tuple[dict[str, int], dict[str, int]]:
    axis = _open(kind)
    x = torch.zeros(2, 6, 4)
    axis.sum(x)
    axis.gather(x, 1)
    axis.scatter_sum(x, 1)
    axis.close()
    return axis.traffic.calls, axis.traffic.bytes


@pytest.mark.parametrize("kind", KINDS)
def test_traffic_counts_the_whole_tensor_of_each_collective(ranks: RankPool, kind: str) -> None:
    for calls, volume in ranks(2, _traffic, kind):
        assert calls == {"all_reduce": 1, "all_gather": 1, "reduce_scatter": 1}
        assert volume == {"all_reduce": 192, "all_gather": 384, "reduce_scatter": 192}


def _lonely(rank: int, kind: str) -> None:
    axis = _open(kind)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    axis.sum(torch.zeros(10))


@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_peer_is_an_error_and_not_a_wait(ranks: RankPool, kind: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankError):
        ranks(2, _lonely, kind, timeout=30)
    assert time.monotonic() - start < 30


PATIENCE = 5  # a group with less fails where a rank that makes it too is late


def _late(rank: int) -> str:
    axis = open_axis(dist.new_group(timeout=timedelta(seconds=PATIENCE)))  # type: ignore[arg-type]
    if rank == 1:
        hear("waited")
        return ""
    with pytest.raises(RuntimeError, match=f"has waited {PATIENCE} s for rank 1 of the tensor group") as caught:
        axis.sum(torch.zeros(3))
    say("waited")
    return str(caught.value)


def test_a_wait_ends_with_the_time_limit_of_the_group(ranks: RankPool) -> None:
    assert "alive" in ranks(2, _late)[0]


def _unequal(rank: int) -> None:
    axis = _open("shared memory")
    with pytest.raises(RuntimeError, match=r"sent (12|16) bytes where rank . has (16|12)"):
        axis.sum(torch.zeros(3 + rank))
    dist.barrier()
    axis.close()


def test_ranks_with_different_shapes_are_told_so(ranks: RankPool) -> None:
    ranks(2, _unequal)

"""Messages between stages arrive whole, in order, without waits of the sender, and never wait for the dead."""

import gc
import os
import resource
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_5d.mesh import ParallelMesh
from lightning_5d.pipeline_parallel.channels import Channels
from lightning_5d.pipeline_parallel.channels.choice import open_channels, pair_channels
from lightning_5d.pipeline_parallel.channels.groups import GroupChannels
from lightning_5d.pipeline_parallel.channels.host import HostChannels
from lightning_5d.pipeline_parallel.channels.message import Layout
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.ranks.words import hear, say

KINDS = ["shared memory", "gloo", "pairs"]
CPU = torch.device("cpu")


def opened(kind: str, pp: int, dp: int = 1, timeout_s: float = 20.0) -> Channels:
    """Channels of one kind; "pairs" is what accelerators get."""
    mesh = ParallelMesh.create({"pp": pp, "dp_replicate": 1, "dp_shard": dp, "cp": 1, "tp": 1}, "cpu")
    limit = timedelta(seconds=timeout_s)
    if kind == "pairs":
        return pair_channels(mesh, CPU, limit, [(a, b) for a in range(pp) for b in range(a)])
    channels = open_channels(mesh, CPU, limit, shared_memory=kind == "shared memory")
    assert type(channels) is (HostChannels if kind == "shared memory" else GroupChannels)
    return channels


def test_a_layout_holds_every_tensor_aligned_and_apart() -> None:
    tensors = [
        torch.arange(6, dtype=torch.int64).view(2, 3),
        torch.tensor(True),
        torch.empty(0, 4),
        torch.randn(3, 5).bfloat16().t(),
        torch.randn(7, dtype=torch.complex64).conj(),
    ]
    layout = Layout.of([(tensor.shape, tensor.dtype) for tensor in tensors])
    assert layout.offsets == (0, 64, 128, 128, 192)
    assert layout.nbytes == 256
    memory = torch.zeros(64 + layout.nbytes, dtype=torch.uint8)[64:]
    layout.pack(tensors, memory)
    found = layout.unpack(memory)
    for got, expected in zip(found, tensors, strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
        assert got.is_contiguous()
    versions = [tensor._version for tensor in found]
    found[0].add_(1)
    assert [tensor._version for tensor in found[1:]] == versions[1:]


def message(number: int) -> list[Tensor]:
    """Every kind of message in turn."""
    generator = torch.Generator().manual_seed(number)
    big = torch.randn(40, 50, generator=generator)
    return [
        [big],
        [big.bfloat16()],
        [big, torch.arange(number), (big > 0)[0], big.to(torch.float16)],
        [torch.empty(0, 3)],
        [],
        [torch.tensor(float(number))],
        [big.t(), torch.empty(0), big[:, ::2]],
        [torch.view_as_complex(big[:, :2].contiguous()).conj()],
    ][number % 8]


def shapes(tensors: list[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


def same(got: list[Tensor], expected: list[Tensor]) -> None:
    assert shapes(got) == shapes(expected)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def _both_ways(rank: int, kind: str, pp: int, dp: int) -> None:
    """Everybody sends to everybody, much before anybody receives; receives are awaited in another order."""
    channels = opened(kind, pp, dp)
    place = rank // dp
    others = [other for other in range(pp) if other != place]
    for step in range(3):
        for number in range(16):
            for other in others:
                channels.send(message(step * 100 + 10 * place + other + number), other)
        arriving = {
            (other, number): channels.receive(shapes(message(step * 100 + 10 * other + place + number)), other)
            for other in others
            for number in range(16)
        }
        for other, number in sorted(arriving, key=lambda key: (key[1] * 7 % 16, -key[0])):
            same(arriving[other, number].wait(), message(step * 100 + 10 * other + place + number))
        channels.finish()
    dist.barrier()
    channels.close()


@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_messages_arrive_in_order_both_ways_between_all(ranks: RankPool, kind: str, pp: int, dp: int) -> None:
    ranks(pp * dp, _both_ways, kind, pp, dp, timeout=40)


def _objects(rank: int, kind: str) -> list[Any]:
    channels = opened(kind, 2)
    got: list[Any] = []
    for number in range(3):
        channels.send(message(number), 1 - rank)
        channels.send_object({"rank": rank, "shapes": shapes(message(number)), "number": number}, 1 - rank)
    for number in range(3):
        same(channels.receive(shapes(message(number)), 1 - rank).wait(), message(number))
        got.append(channels.receive_object(1 - rank))
    channels.finish()
    dist.barrier()
    channels.close()
    return got


@pytest.mark.parametrize("kind", KINDS)
def test_objects_are_messages_among_the_others(ranks: RankPool, kind: str) -> None:
    first, second = ranks(2, _objects, kind)
    assert first == [{"rank": 1, "shapes": shapes(message(number)), "number": number} for number in range(3)]
    assert [each["rank"] for each in second] == [0, 0, 0]


def _sends_do_not_wait(rank: int, kind: str) -> None:
    channels = opened(kind, 2)
    if rank == 0:
        for number in range(2000):
            channels.send([torch.full((1000,), float(number))], 1)
    dist.barrier()  # a send that waits never comes here
    if rank == 1:
        for number in range(2000):
            (tensor,) = channels.receive([((1000,), torch.float32)], 0).wait()
            assert tensor[0].item() == tensor[-1].item() == number
    channels.finish()
    dist.barrier()
    channels.close()


@pytest.mark.parametrize("kind", ["shared memory", "gloo"])
def test_nobody_waits_for_a_message_to_be_taken(ranks: RankPool, kind: str) -> None:
    ranks(2, _sends_do_not_wait, kind)


def _belongs_to_the_receiver(rank: int, kind: str) -> None:
    """A receiver keeps some messages and writes to them, while others come: none of them changes."""
    channels = opened(kind, 2)
    other, kept = 1 - rank, []
    for number in range(30):
        sent = torch.full((2000,), float(number + 100 * rank))
        channels.send([sent, sent[:3]], other)
        whole, part = channels.receive(shapes([sent, sent[:3]]), other).wait()
        if number % 5 == 0:
            kept.append((number, whole.requires_grad_()))
            (2 * whole).sum().backward()
        part.add_(1)
        assert part.tolist() == [number + 100 * other + 1] * 3
    for number, tensor in kept:
        assert tensor.detach().unique().item() == number + 100 * other
        assert tensor.grad is not None
        assert tensor.grad.unique().item() == 2
    dist.barrier()
    channels.close()
    assert kept[-1][1].detach().unique().item() == 25 + 100 * other, "what has arrived stays after the end"


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_belongs_to_its_receiver(ranks: RankPool, kind: str) -> None:
    ranks(2, _belongs_to_the_receiver, kind)


def _memory_comes_back(rank: int) -> tuple[int, int]:
    channels = opened("shared memory", 2)
    for number in range(100):
        if rank == 0:
            channels.send([torch.full((50_000,), float(number))], 1)
            (back,) = channels.receive([((10,), torch.float32)], 1).wait()
        else:
            (tensor,) = channels.receive([((50_000,), torch.float32)], 0).wait()
            channels.send([tensor[:10]], 0)
            back = tensor
        assert back[0].item() == number
        del back
    held = sum(tensor.nbytes for tensor in channels.memory())
    mapped = sum(tensor.nbytes for tensor in channels.mapped())
    dist.barrier()
    channels.close()
    return held, mapped


def test_memory_is_used_again_when_the_receiver_has_let_go_of_it(ranks: RankPool) -> None:
    (held, mapped), (their_held, their_mapped) = ranks(2, _memory_comes_back)
    assert 200_000 <= held <= 3 * 200_704
    assert (mapped, their_mapped) == (their_held, held)


def _sent_memory_is_let_go(rank: int) -> int:
    """With gloo a sent tensor is let go before the step ends, once it has been taken."""
    channels = opened("gloo", 2)
    if rank == 1:
        for _ in range(3):
            channels.receive([((10,), torch.float32)], 0).wait()
        dist.barrier()
        return 0
    import weakref

    alive = []
    for _ in range(3):
        tensor = torch.zeros(10)
        alive.append(weakref.ref(tensor.untyped_storage()))
        channels.send([tensor], 1)
        del tensor
    dist.barrier()
    limit = time.monotonic() + 60
    while any(ref() is not None for ref in alive) and time.monotonic() < limit:
        time.sleep(0.01)
    return sum(ref() is not None for ref in alive)


def test_what_has_been_taken_is_let_go_before_the_step_ends(ranks: RankPool) -> None:
    assert ranks(2, _sent_memory_is_let_go)[0] == 0


def _death(rank: int, kind: str, before: float, sends: bool) -> None:
    channels = opened(kind, 2)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(before)
    if sends:
        channels.send([torch.zeros(1000)], 1)
    channels.receive([((1000,), torch.float32)], 1).wait()


@pytest.mark.parametrize("sends", [False, True], ids=["receives", "sends"])
@pytest.mark.parametrize("before", [0.0, 0.5], ids=["just now", "long ago"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_wait_for_a_rank_that_dies_is_an_error(ranks: RankPool, kind: str, before: float, sends: bool) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"[Rr]ank 1 of the pipeline"):
        ranks(2, _death, kind, before, sends, timeout=30)
    assert time.monotonic() - start < 30


def _refused(rank: int, kind: str) -> tuple[float, str]:
    """Rank 1 is there and never sends."""
    channels = opened(kind, 2, timeout_s=1.0)
    start = time.monotonic()
    said = ""
    if rank == 0:
        with pytest.raises(RuntimeError) as caught:
            channels.receive([((1000,), torch.float32)], 1).wait()
        said = str(caught.value)
        say("refused")
    else:
        hear("refused")
    channels.close()
    return time.monotonic() - start, said


@pytest.mark.parametrize("kind", ["shared memory", "gloo"])
def test_a_wait_ends_with_the_time_limit(ranks: RankPool, kind: str) -> None:
    took, said = ranks(2, _refused, kind)[0]
    assert 0.9 < took < 30
    assert "rank 1 of the pipeline" in said


def _not_taken(rank: int) -> str:
    channels = opened("gloo", 2, timeout_s=1.0)
    if rank == 1:
        hear("not taken")
        return ""
    channels.send([torch.zeros(1_000_000)], 1)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        channels.finish()
    assert time.monotonic() - start < 30
    say("not taken")
    channels.close()
    return str(caught.value)


def test_a_message_that_nobody_takes_is_an_error_at_the_end_of_the_step(ranks: RankPool) -> None:
    assert "Rank 1 of the pipeline has not taken a message" in ranks(2, _not_taken)[0]


def _another_size(rank: int) -> str:
    channels = opened("shared memory", 2)
    if rank == 0:
        channels.send([torch.zeros(10)], 1)
        said = ""
    else:
        with pytest.raises(RuntimeError) as caught:
            channels.receive([((40,), torch.float32)], 0).wait()
        said = str(caught.value)
    dist.barrier()
    channels.close()
    return said


def test_a_message_of_another_size_is_an_error(ranks: RankPool) -> None:
    assert "Rank 0 of the pipeline sent 64 bytes where 192 were expected" in ranks(2, _another_size)[1]


def _unknown_pair(rank: int) -> None:
    mesh = ParallelMesh.create({"pp": 4, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}, "cpu")
    channels = pair_channels(mesh, CPU, timedelta(seconds=20), None)
    with pytest.raises(ValueError, match=f"no line to rank {(rank + 2) % 4} of the pipeline; there are lines to: "):
        channels.send([torch.zeros(1)], (rank + 2) % 4)
    channels.send([torch.full((1,), float(rank))], (rank + 1) % 4)
    (tensor,) = channels.receive([((1,), torch.float32)], (rank - 1) % 4).wait()
    assert tensor.item() == (rank - 1) % 4
    channels.finish()


def test_neighbours_have_lines_and_others_only_if_asked_for(ranks: RankPool) -> None:
    ranks(4, _unknown_pair)


def _leaks(rank: int, kind: str) -> tuple[int, int]:
    def use() -> None:
        channels = opened_on(mesh)
        channels.send([torch.zeros(100_000)], 1 - rank)
        channels.receive([((100_000,), torch.float32)], 1 - rank).wait()
        channels.finish()
        dist.barrier()
        channels.close()

    mesh = ParallelMesh.create({"pp": 2, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}, "cpu")
    opened_on: Callable[[ParallelMesh], Channels] = lambda mesh: open_channels(  # noqa: E731
        mesh, CPU, timedelta(seconds=20), shared_memory=kind == "shared memory"
    )
    use()
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), _maps()
    for _ in range(5):
        use()
    gc.collect()
    return len(os.listdir("/proc/self/fd")) - before[0], _maps() - before[1]


def _maps() -> int:
    with open("/proc/self/maps") as file:
        return sum("lightning-5d" in line for line in file)


@pytest.mark.parametrize("kind", ["shared memory", "gloo"])
def test_closed_channels_leave_no_files_and_no_memory(ranks: RankPool, kind: str) -> None:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 100
    assert ranks(2, _leaks, kind) == [(0, 0), (0, 0)]


def test_a_pipeline_of_one_rank_needs_no_others(ranks: RankPool) -> None:
    assert ranks(1, _alone) == ["There is no line to rank 0 of the pipeline; there are lines to: none."]


def _alone(rank: int) -> str:
    mesh = ParallelMesh.create({"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}, "cpu")
    channels = Channels.open(mesh, CPU, timedelta(seconds=20))
    channels.finish()
    with pytest.raises(ValueError) as caught:
        channels.send([torch.zeros(1)], 0)
    channels.close()
    return str(caught.value)

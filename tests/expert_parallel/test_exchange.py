"""Rows arrive in the order that experts want, and go back to where they came from."""

import resource
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_5d.expert_parallel.exchange import TokenExchange
from lightning_5d.expert_parallel.host_exchange import HostTokenExchange
from tests.expert_parallel.test_dispatch import KINDS, open_kind
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool

SIZE, EXPERTS, WIDTH = 3, 6, 4


def _numbers(seed: int) -> Tensor:
    """Rows of each rank for each expert; one rank has none, and one expert gets none."""
    numbers = torch.randint(0, 4, (SIZE, EXPERTS), generator=torch.Generator().manual_seed(seed))
    numbers[seed % SIZE] = 0
    numbers[:, seed % EXPERTS] = 0
    return numbers


def _rows(numbers: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """The rows of a rank: each says whose it is, for whom, and which."""
    rows = [[rank, expert, row, 1] for expert, count in enumerate(numbers[rank].tolist()) for row in range(count)]
    return torch.tensor(rows, dtype=dtype).view(-1, WIDTH)


def _there(numbers: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """What arrives: by own expert, then by rank."""
    mine = range(rank * EXPERTS // SIZE, (rank + 1) * EXPERTS // SIZE)
    rows = [[r, e, row, 1] for e in mine for r in range(SIZE) for row in range(int(numbers[r, e]))]
    return torch.tensor(rows, dtype=dtype).view(-1, WIDTH)


def _values(rank: int, kind: str) -> None:
    exchange = open_kind(kind)
    for seed, dtype in enumerate([torch.float32, torch.bfloat16, torch.float16, torch.float64] * 2):
        numbers = _numbers(seed) if seed < 7 else torch.zeros(SIZE, EXPERTS, dtype=torch.int64)
        own, there = _rows(numbers, rank, dtype), _there(numbers, rank, dtype)
        routes = exchange.routes(numbers[rank], WIDTH * dtype.itemsize)
        assert torch.equal(routes.received_M, numbers.sum(0).view(SIZE, -1)[rank])
        exchange.traffic.reset()
        arrived = exchange.start_dispatch(own, routes).wait()
        assert torch.equal(arrived, there)
        assert exchange.traffic.bytes["all_to_all"] == own.nbytes
        # Two at once, of which the later one is waited for first; one from memory that others may read.
        ready = exchange.empty(there.shape, there).copy_(there)
        first, second = exchange.start_return(ready, routes), exchange.start_return(2 * there, routes)
        assert torch.equal(second.wait(), 2 * own)
        assert torch.equal(first.wait(), own)
        assert torch.equal(own, _rows(numbers, rank, dtype))
    exchange.close()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_arrive_by_expert_and_go_back(ranks: RankPool, kind: str) -> None:
    ranks(SIZE, _values, kind)


def _kept(rank: int) -> None:
    exchange = open_kind("shared memory")
    generator = torch.Generator().manual_seed(rank)
    for _ in range(40):
        counts = torch.randint(200, 400, (4,), generator=generator)
        routes = exchange.routes(counts, 400)
        rows = torch.randn(int(counts.sum()), 100)
        back = exchange.start_return(exchange.start_dispatch(rows, routes).wait(), routes).wait()
        assert torch.equal(back, rows)
        dist.barrier()
    largest = 2 * 2 * 400 * 100 * 4  # rows of two experts, of both ranks
    # Two messages under way, of as many sizes as lie between the fewest rows and the most.
    assert sum(block.nbytes for block in exchange.memory()) <= 4 * 1.25 * largest
    assert exchange.mapped()
    exchange.close()


def test_memory_serves_other_numbers_of_rows_again(ranks: RankPool) -> None:
    ranks(2, _kept)


class _Counted:
    """A connection that counts what it sends."""

    def __init__(self, connection: Any) -> None:
        self.connection, self.packets = connection, 0

    def send(self, packet: bytes) -> int:
        self.packets += 1
        return int(self.connection.send(packet))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)


def _packets(rank: int) -> None:
    exchange = open_kind("shared memory")
    assert isinstance(exchange, HostTokenExchange)
    (peer,) = exchange._host.peers.values()
    rows, counts = torch.randn(8, 100), torch.full((4,), 2)

    def there_and_back() -> None:
        routes = exchange.routes(counts, 400)
        exchange.start_return(exchange.start_dispatch(rows, routes).wait(), routes).wait()

    # As much memory as can be under way: a rank without says at once what it has read, as it is about to take more.
    held = [exchange.empty(rows.shape, rows) for _ in range(3)]
    del held
    there_and_back()
    peer.connection = _Counted(peer.connection)  # type: ignore[assignment]
    for _ in range(5):
        there_and_back()
    assert peer.connection.packets == 10  # type: ignore[attr-defined]
    dist.barrier()
    exchange.close()


def test_there_and_back_are_one_packet_each(ranks: RankPool) -> None:
    ranks(2, _packets)


def _message(rank: int, kind: str, experts: int, row_bytes: int) -> str:
    exchange = open_kind(kind)
    assert exchange.routes(torch.ones(4, dtype=torch.int64), 8).received_M.tolist() == [2, 2]
    with pytest.raises((RuntimeError, ValueError)) as found:
        exchange.routes(torch.ones(experts if rank else 6, dtype=torch.int64), row_bytes if rank else 16).received_M  # noqa: B018
    dist.barrier()
    exchange.close()
    return str(found.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("experts", "row_bytes", "said"),
    [(8, 16, "8 experts where rank 0 has 6"), (6, 32, "32 bytes in a row where rank 0 has 16")],
)
def test_ranks_that_disagree_are_told(ranks: RankPool, kind: str, experts: int, row_bytes: int, said: str) -> None:
    first, second = ranks(2, _message, kind, experts, row_bytes)
    assert said in first
    assert "Rank 0 of the expert group has" in second


def _indivisible(rank: int) -> None:
    with pytest.raises(ValueError, match="2 ranks do not divide 5 experts"):
        open_kind("shared memory").routes(torch.ones(5, dtype=torch.int64), 8)


def test_ranks_have_equal_numbers_of_experts(ranks: RankPool) -> None:
    ranks(2, _indivisible)


def _missing(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=5))  # with less it fails where a rank that makes it too is late
    exchange: TokenExchange = open_kind("shared memory", group)
    routes = exchange.routes(torch.ones(2, dtype=torch.int64), 8)
    if rank == 0:
        exchange.start_dispatch(torch.ones(2, 2), routes).wait()
    dist.barrier()


def test_a_rank_that_never_comes_is_waited_for_as_long_as_its_group_says(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="Rank 0 has waited 5 s for rank 1 of the expert group"):
        ranks(2, _missing, timeout=20)


def _out_of_memory(rank: int) -> str:
    exchange = open_kind("shared memory")
    routes = exchange.routes(torch.ones(2, dtype=torch.int64), 8)
    exchange.start_return(exchange.start_dispatch(torch.ones(2, 2), routes).wait(), routes).wait()
    mapped = Path("/proc/self/maps").read_text()
    assert "lightning-5d" in mapped
    assert "/dev/shm/" not in mapped, "so it does not matter how small that is"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if rank:  # as a container without memory: a file of it cannot grow
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
        routes = exchange.routes(torch.full((2,), 1000), 256)
        with pytest.raises((MemoryError, RuntimeError)) as found:
            exchange.start_dispatch(torch.ones(2000, 64), routes).wait()
    finally:
        exchange.close()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return str(found.value)


def test_no_room_for_memory_is_an_error_at_once_on_all_ranks(ranks: RankPool) -> None:
    first, second = ranks(2, _out_of_memory, timeout=20)
    assert "Rank 1 of the expert group is gone" in first
    assert "No room for" in second
    assert "rank 1 of the expert group shares" in second

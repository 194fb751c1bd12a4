"""What a rank holds at each stage, counted in bytes of live storage."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_5d.data_parallel import ShardOptions, shard
from lightning_5d.data_parallel.reducer import GradientReducer
from lightning_5d.data_parallel.reduction import PendingReductions
from lightning_5d.data_parallel.shared_memory import SharedMemory
from lightning_5d.data_parallel.traffic import Traffic
from tests.data_parallel.training import inputs, make, mesh_engine

TRAINED = sum(p.numel() * 4 for p in make("Net").parameters())


def _bytes(tensors) -> int:
    """Bytes of memory behind tensors, each piece counted once; freed storages count nothing."""
    seen = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        seen[local.untyped_storage()._cdata] = local.untyped_storage().nbytes()
    return sum(seen.values())


def _held(rank: int, stage: int) -> dict[str, int]:
    module: nn.Module = make("Net")
    engine = mesh_engine(module, 2, 1, ShardOptions(stage=stage))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for step in range(2):
        engine.begin(last=True)
        module.loss(inputs(step, 0, rank), rank).backward()
        engine.wait()
        optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    full = [p._unsharded_param for group in engine.groups for p in group.fsdp_params] if stage else []
    held = {
        "parameters": _bytes([*module.parameters(), *full]),
        "gradients": _bytes(p.grad for p in module.parameters()),
        "optimizer": _bytes(states),
    }
    engine.close()
    return held


@pytest.mark.parametrize(
    ("stage", "parameters", "gradients", "optimizer"),
    [(0, 1.0, 1.0, 2.0), (1, 1.0, 0.5, 1.0), (2, 1.0, 0.5, 1.0), (3, 0.5, 0.5, 1.0)],
)
def test_a_rank_of_two_holds_what_its_stage_says(ranks, stage, parameters, gradients, optimizer):
    """In units of the parameters' bytes, between steps; padding and whole pages allow for a few per cent."""
    for held in ranks(2, _held, stage, timeout=40):
        # Shards are padded to a multiple of the ranks, and sharded gradients live in whole pages per block.
        assert held["parameters"] / TRAINED == pytest.approx(parameters, rel=0.15)
        assert held["optimizer"] / TRAINED == pytest.approx(optimizer, rel=0.15)
        pages = 4 * 4096 / TRAINED if stage else 0
        assert gradients * 0.95 <= held["gradients"] / TRAINED <= gradients * 1.15 + pages


def _peaks(rank: int, stage: int) -> int:
    """The most bytes of full parameters alive at once, seen at every block's forward and backward."""
    module = make("Net")
    engine = mesh_engine(module, 2, 1, ShardOptions(stage=stage))
    peak = 0

    def look(*_) -> None:
        nonlocal peak
        full = [getattr(p, "_unsharded_param", None) for group in engine.groups for p in group.fsdp_params]
        peak = max(peak, _bytes(p for p in full if p is not None))

    for block in module.blocks:
        block.down.register_forward_hook(look)
        block.down.register_full_backward_hook(look)
    engine.begin(last=True)
    module.loss(inputs(0, 0, rank), rank).backward()
    engine.wait()
    engine.close()
    return peak


def test_stage_3_has_one_block_and_the_root_in_full_at_a_time(ranks):
    module = make("Net")
    block = sum(p.numel() * 4 for p in module.blocks[0].parameters())
    root = TRAINED - 3 * block
    for peak in ranks(2, _peaks, 3, timeout=40):
        assert peak <= 1.15 * (root + block)
    for peak in ranks(2, _peaks, 2, timeout=40):
        assert peak >= TRAINED


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(12))
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def _exchange_bytes(rank: int, stage: int) -> int:
    torch.manual_seed(0)
    module = _Deep()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    engine = shard(module, list(module.blocks), mesh, ShardOptions(stage=stage))
    engine._exchange.peers[0].pending = PendingReductions(
        patience_s=20.0
    )  # on a busy machine the other rank may be late
    for _ in range(3):
        engine.begin(last=True)
        module(torch.randn(3, 32)).pow(2).mean().backward()
        engine.wait()
    held = sum(block.nbytes for block in engine._exchange.peers[0].shard.host.blocks)
    engine.close()
    return held


def test_stage_3_exchanges_through_a_few_blocks_of_memory_however_deep_the_model(ranks):
    """Gather and reduction of a block take half of it each, in whole pages; a few of both are under way at once."""
    block, page = 33 * 32 * 4, 4096
    for held in ranks(2, _exchange_bytes, 3, timeout=40):
        assert held <= 12 * page
        assert held < 12 * block


def _bucket_bytes(rank: int) -> int:
    module = _Deep()
    transport = SharedMemory.connect(torch.distributed.group.WORLD, timeout_s=30.0)
    reducer = GradientReducer(list(module.parameters()), transport, Traffic(), bucket_bytes=33 * 32 * 4)
    reducer._pending = PendingReductions(patience_s=20.0)  # on a busy machine the other rank may be late
    for _ in range(3):
        module(torch.randn(3, 32)).pow(2).mean().backward()
        reducer.finish()
    held = sum(block.nbytes for block in transport.host.blocks)
    reducer.close()
    transport.close()
    return held


def test_stage_0_averages_through_a_few_buckets_of_memory_however_deep_the_model(ranks):
    """Three buckets under way, and as many that the other rank, which has the same limit, has not read yet."""
    bucket = 2 * 4096  # 33 * 32 * 4 bytes in whole pages
    for held in ranks(2, _bucket_bytes, timeout=40):
        assert held <= 8 * bucket + 4096
        assert held < 12 * bucket

"""Stage 3 where ranks use different blocks: everyone gets what it needs, and the gradients are the mean."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from lightning_5d.data_parallel import ShardOptions, shard
from lightning_5d.data_parallel.exchange import Walk
from tests.data_parallel.training import whole

WIDTH, BLOCKS = 8, 6


class Stack(nn.Module):
    """Blocks that a case calls as it likes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, case: str, rank: int) -> Tensor | None:
        return CASES[case](self, x, rank)


def _run(module: Stack, x: Tensor, order: range | list[int]) -> Tensor:
    for index in order:
        x = torch.tanh(module.blocks[index](x)) + x
    return x


def _nothing(module: Stack, x: Tensor, rank: int) -> Tensor:
    out = module.head(_run(module, x, range(BLOCKS))).mean()
    return out if rank == 0 else out.detach() * torch.zeros((), requires_grad=True)


def _no_backward(module: Stack, x: Tensor, rank: int) -> Tensor | None:
    out = module.head(_run(module, x, range(BLOCKS))).mean()
    return out if rank == 0 else None


def _some(module: Stack, x: Tensor, rank: int) -> Tensor:
    first = _run(module, x, [0, 1])
    rest = _run(module, first, [2, 3, 4, 5])
    return (module.head(rest) if rank == 0 else first).mean()


def _cut(module: Stack, x: Tensor, rank: int) -> Tensor:
    middle = _run(module, x, [0, 1, 2])
    if rank:
        middle = middle.detach()
    return module.head(_run(module, middle, [3, 4, 5])).mean()


def _other_order(module: Stack, x: Tensor, rank: int) -> Tensor:
    order = [4, 0, 5, 2, 1, 3]
    return module.head(_run(module, x, order if rank == 0 else order[::-1])).mean()


def _twice(module: Stack, x: Tensor, rank: int) -> Tensor:
    first = _run(module, x, [0, 1, 2, 3])
    second = _run(module, first.detach() if rank else first, [1, 3, 4, 5])
    return module.head(second).mean()


def _recomputed(module: Stack, x: Tensor, rank: int) -> Tensor:
    for index in range(BLOCKS):
        x = checkpoint(_run, module, x, [index], use_reentrant=False)
    return module.head(x).mean()


def _recomputed_in_one(module: Stack, x: Tensor, rank: int) -> Tensor:
    x = checkpoint(_run, module, x, [0, 1, 2], use_reentrant=False)
    x = checkpoint(_run, module, x, [3, 4, 5], use_reentrant=False)
    out = module.head(x).mean()
    return out if rank == 0 else out.detach() * torch.zeros((), requires_grad=True)


def _branches(module: Stack, x: Tensor, rank: int) -> Tensor:
    return module.head(_run(module, x, [[0, 2, 4], [1, 3, 5], [5, 0]][rank])).mean()


CASES = {
    "a loss that touches nothing": _nothing,
    "no backward": _no_backward,
    "some blocks": _some,
    "a graph cut in the middle": _cut,
    "another order than that of registration": _other_order,
    "blocks used twice, on one rank's graph once": _twice,
    "recomputed block by block": _recomputed,
    "recomputed three at a time, on one rank only": _recomputed_in_one,
    "other branches": _branches,
}


def _batch(step: int, microbatch: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * microbatch + rank))


def _on_rank(rank: int, case: str, ranks: int) -> list[dict[str, Tensor | None]]:
    module = Stack()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",))
    engine = shard(module, list(module.blocks), mesh, ShardOptions(stage=3))
    optimizer, seen = torch.optim.SGD(module.parameters(), lr=0.1), []
    for step in range(2):
        for microbatch in range(2):
            engine.begin(last=microbatch == 1)
            # In turns: who has less to do in one microbatch has more in the next.
            loss = module(_batch(step, microbatch, rank), case, (rank + microbatch) % ranks)
            if loss is not None:
                (loss / 2).backward()
        engine.wait()
        seen.append({n: None if p.grad is None else whole(p.grad) for n, p in module.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    return seen


def _alone(case: str, ranks: int) -> list[dict[str, Tensor | None]]:
    module = Stack()
    optimizer, seen = torch.optim.SGD(module.parameters(), lr=0.1), []
    for step in range(2):
        for microbatch in range(2):
            for rank in range(ranks):
                loss = module(_batch(step, microbatch, rank), case, (rank + microbatch) % ranks)
                if loss is not None:
                    (loss / 2 / ranks).backward()
        seen.append({n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_ranks_may_use_different_blocks_in_backward(ranks, case, world):
    expected = _alone(case, world)
    for got in ranks(world, _on_rank, case, world, timeout=30):
        for mine, right in zip(got, expected, strict=True):
            for name, value in right.items():
                torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


class _Group:
    """Notes when it is sent, and whether it was taken in."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.arriving = log, name, False
        self.is_unsharded = self.is_trained = False

    def send(self) -> None:
        self.log.append(self.name)
        self.arriving = True

    def discard_arrival(self) -> None:
        self.arriving = False


def test_a_walk_sends_one_group_ahead_and_each_once_in_order_whatever_is_reached():
    log: list[str] = []
    groups = [_Group(log, name) for name in "abcdef"]
    walk = Walk(groups, ahead=1, whole_too=True)
    for reached, sent in (("a", "ab"), ("b", "abc"), ("a", "abc"), ("d", "abcde"), ("c", "abcde")):
        walk.reach(groups["abcdef".index(reached)])
        assert "".join(log) == sent
    walk.finish()
    assert "".join(log) == "abcdef"
    assert not any(group.arriving for group in groups)


def test_what_is_not_in_a_walk_comes_before_it():
    log: list[str] = []
    groups = [_Group(log, name) for name in "abc"]
    walk = Walk(groups, ahead=1, whole_too=True)
    walk.reach(_Group(log, "root"))
    assert log == ["a"]


def test_a_walk_takes_in_each_group_before_it_sends_the_next_of_those_not_used():
    log: list[str] = []
    groups = [_Group(log, name) for name in "abcd"]
    under_way = []
    for group in groups:
        group.send = lambda g=group: (_Group.send(g), under_way.append(sum(other.arriving for other in groups)))
    Walk(groups, ahead=1, whole_too=True).finish()
    assert under_way == [1, 1, 1, 1]

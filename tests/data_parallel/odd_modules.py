"""Modules that sharding finds difficult, each with the blocks a plan would name and a loss for each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 7


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """An ordinary network; sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)

    def parallel_blocks(self) -> Sequence[nn.Module]:
        return list(self.blocks)

    def loss(self, x: Tensor, rank: int) -> Tensor:
        return self(x, rank).pow(2).mean()


class Frozen(Net):
    """One block frozen as a whole, one in part, as LoRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[1].up.requires_grad_(False)


class AllFrozenButHead(Net):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.out.requires_grad_(True)


class DoubleNormBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x.double()).float())))


class TwoDtypes(Net):
    """Parameters of two dtypes inside each block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DoubleNormBlock() for _ in range(3))


class TiedAcrossBlocks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


class TiedWithRoot(Net):
    """A block's weight is also used by the root."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, 3 * WIDTH + 1, bias=False)
        self.extra.weight = self.blocks[1].up.weight

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        return super().forward(x) + self.extra(self.inp(x)).mean()


class TiedInRoot(Net):
    """Embedding and head share one weight, the usual case."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, 5, bias=False)
        self.out.weight = nn.Parameter(torch.randn(5, WIDTH) / 3)
        self.inp.weight = self.out.weight

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        x = x @ self.inp.weight
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class SharedBlock(Net):
    """One block called several times."""

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        x = self.inp(x)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[2]):
            x = block(x)
        return self.out(x)


class ScalarBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain + self.one


class Scalar(Net):
    """Parameters without dimensions, in the root and in blocks, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ScalarBlock() for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor(0.5), requires_grad=False)

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        x = self.inp(x) * self.scale + self.shift
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Collections(Net):
    """ParameterList and ParameterDict, and a weight of a submodule whose forward never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(2))
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(WIDTH))})
        self.functional = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        x = self.inp(x) + self.many[0] * self.many[1] + self.named["a"]
        x = F.linear(x, self.functional.weight, self.functional.bias)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Nested(Net):
    """Submodules of submodules are called by the step, and the module calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.encoder = nn.Sequential(Block(), Block())
        self.model.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        if x.shape[-1] == 5:  # the step
            return self.out(self(self.inp(x)))
        return self.model.encoder(x) * self.model.scale

    def parallel_blocks(self) -> Sequence[nn.Module]:
        return list(self.model.encoder)


class Checkpointed(Net):
    """Activations of blocks are recomputed in backward."""

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.out(x)


class CheckpointedInside(Net):
    """Only a part of each block is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = _checkpointed_forward(block)


def _checkpointed_forward(block: nn.Module) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return x + checkpoint(lambda y: block.down(torch.tanh(block.up(block.norm(y)))), x, use_reentrant=False)

    return forward


class UnusedByAll(Net):
    """A block and a root parameter that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(3, 3)

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        x = self.inp(x)
        for block in (self.blocks[0], self.blocks[2]):
            x = block(x)
        return self.out(x)


class UsedByOneRank(Net):
    """Blocks, whole and in part, that only one rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.special = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        x = self.inp(x)
        x = self.blocks[0](x)
        if rank == 1:
            x = self.special(x)
            x = self.blocks[1](x)
            x = self.blocks[2](x)
        return self.out(self.blocks[3](x))


class LastBlockOnOneRank(Net):
    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        x = self.inp(x)
        for block in self.blocks[: 3 if rank == 0 else 1]:
            x = block(x)
        return self.out(x)


class TwoForwards(Net):
    """The root's forward runs twice before one backward."""

    def loss(self, x: Tensor, rank: int) -> Tensor:
        return self(x, rank).pow(2).mean() + self(x.flip(0) * 2, rank).abs().mean()


class Buffered(Net):
    """A buffer that the forward changes and one that it only reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        self.count += 1
        x = self.inp(x) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Compiled(Net):
    """Blocks compiled in place; their names stay. The eager backend stands for any: hooks and graphs are the same."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")


class NoBlocks(Net):
    def parallel_blocks(self) -> Sequence[nn.Module]:
        return []


class BlocksOwnEverything(nn.Module):
    """The root has no parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(5) for _ in range(2))

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def parallel_blocks(self) -> Sequence[nn.Module]:
        return list(self.blocks)

    def loss(self, x: Tensor, rank: int) -> Tensor:
        return self(x, rank).pow(2).mean()


class DictOutput(Net):
    """The step returns a dictionary, as Lightning's steps may."""

    def forward(self, x: Tensor, rank: int = 0) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": super().forward(x).pow(2).mean()}

    def loss(self, x: Tensor, rank: int) -> Tensor:
        return self(x, rank)["loss"]

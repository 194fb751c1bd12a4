"""What an axis knows while a part of a step runs first, that part finds again when backward runs it a second time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from lightning_5d import ActivationCheckpointing, FiveD, PipelineParallel
from lightning_5d.parallelism import Parallelism, Parallelized
from lightning_5d.recompute_contexts import RecomputeContexts
from lightning_5d.replaced_forward import ReplacedForward
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, Dealt, apart, fit

OPEN: list[float] = []
"""What is known inside of the doors that are open."""


@contextmanager
def opened(known: float) -> Iterator[None]:
    OPEN.append(known)
    try:
        yield
    finally:
        OPEN.pop()


class Door(ReplacedForward):
    """Inside of it is known what came in."""

    def __call__(self, x: Tensor) -> Any:
        with opened(float(x.detach().mean())):
            return self.original(x)


class AtWork(Parallelized):
    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def all_at_work(self, axes: Sequence[Parallelized]) -> None:
        door = self._module.get_submodule("net")
        door.__dict__["forward"] = Door(door)

    def recompute_context(self) -> Callable[[], AbstractContextManager[Any]]:
        return partial(opened, OPEN[-1])


@dataclass(frozen=True)
class Doors(Parallelism):
    axis: ClassVar[str] = "context"
    order: ClassVar[int] = 40

    def parallelize(self, module: nn.Module, *args: Any) -> Parallelized:
        return AtWork(module)


class Asking(nn.Module):
    """Its result depends on what is known where it runs; outside of doors it cannot run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + OPEN[-1] * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, by_hand: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Asking(4) for _ in range(4))
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.by_hand is None else checkpoint(layer, x, use_reentrant=self.by_hand)
        return x


class Model(L.LightningModule):
    def __init__(self, by_hand: bool | None = None, compiled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net(by_hand)
        if compiled:
            for layer in self.net.layers:
                layer.compile(backend="aot_eager")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        # Reentrant checkpoints want an input with a gradient.
        return self.net(batch.clone().requires_grad_()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Numbers(Dataset[Tensor]):
    """Rows of which each has another mean."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(4, generator=torch.Generator().manual_seed(index)) + index


def run(ranks: RankPool, world: int, make: Callable[[], Any], *plugins: Any, **strategy: Any) -> list[dict[str, Any]]:
    made = partial(FiveD, Doors(), *plugins, **strategy)
    return ranks(
        world, partial(fit, module=make, data=partial(Dealt, Numbers(), 8), strategy=made, devices=world), **SEPARATE
    )


FULL, SELECTIVE, HALF = "full", "selective", ActivationCheckpointing(memory_budget=0.5)


@pytest.fixture(scope="module")
def expected(rank_pool: RankPool) -> dict[str, Any]:
    return run(rank_pool, 1, Model)[0]


@pytest.mark.parametrize("mode", [FULL, SELECTIVE, HALF], ids=["full", "selective", "budget"])
def test_every_mode(ranks: RankPool, expected: dict[str, Any], mode: Any) -> None:
    found = run(ranks, 1, Model, activation_checkpointing=mode)
    assert max(apart(found, expected, 1e-6).values()) < 1e-6


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_of_the_users_own(ranks: RankPool, expected: dict[str, Any], reentrant: bool) -> None:
    found = run(ranks, 1, partial(Model, reentrant))
    assert max(apart(found, expected, 1e-6).values()) < 1e-6


def test_compiled_blocks(ranks: RankPool, expected: dict[str, Any]) -> None:
    found = run(ranks, 1, partial(Model, compiled=True), activation_checkpointing=FULL)
    assert max(apart(found, expected, 1e-6).values()) < 1e-6


@pytest.mark.parametrize(("schedule", "mode"), [("1f1b", FULL), ("zb_h1", SELECTIVE), ("zb_v", FULL)])
def test_several_microbatches_in_flight(ranks: RankPool, schedule: str, mode: Any) -> None:
    # The door's mean is that of a microbatch: the comparison is with a pipeline that keeps its activations.
    pipeline = PipelineParallel(2, schedule=schedule, microbatches=4)
    kept = run(ranks, 2, Model, pipeline)
    found = run(ranks, 2, Model, pipeline, activation_checkpointing=mode)
    by_hand = run(ranks, 2, partial(Model, False), pipeline)
    assert max(apart(found, kept[0], 1e-6).values()) < 1e-6
    assert max(apart(by_hand, kept[0], 1e-6).values()) < 1e-6


def test_contexts_cost_nothing_where_no_axis_changes_within_a_step() -> None:
    class Steady(Parallelized):
        def step_context(self) -> AbstractContextManager[None]:
            return opened(1.0)

    contexts = RecomputeContexts([Parallelized(), Steady(), Parallelized()])
    assert contexts.now() == contexts.now()
    before = torch_checkpoint.CheckpointFunction
    with contexts.of_others():
        assert torch_checkpoint.CheckpointFunction is before
    with contexts.now()():
        assert OPEN == [1.0]
    assert OPEN == []


def test_torch_gets_its_functions_back() -> None:
    def failing() -> None:
        with RecomputeContexts([AtWork(nn.Module())]).of_others():
            assert torch_checkpoint.CheckpointFunction is not before[0]
            raise RuntimeError

    before = torch_checkpoint.CheckpointFunction, torch_checkpoint._checkpoint_without_reentrant_generator
    with pytest.raises(RuntimeError):
        failing()
    assert before == (torch_checkpoint.CheckpointFunction, torch_checkpoint._checkpoint_without_reentrant_generator)


def test_a_recomputed_part_that_recomputes_parts_of_its_own() -> None:
    layer = Asking(4)
    axis = AtWork(nn.Module())

    def outer(x: Tensor) -> Tensor:
        return checkpoint(layer, checkpoint(layer, x, use_reentrant=False), use_reentrant=False)

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        layer.zero_grad()
        with RecomputeContexts([axis]).of_others(), opened(0.5):
            loss = run(torch.ones(2, 4)).square().mean()
        loss.backward()
        return [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]

    nested = gradients(lambda x: checkpoint(outer, x, use_reentrant=False))
    torch.testing.assert_close(nested, gradients(lambda x: layer(layer(x))), rtol=0, atol=0)

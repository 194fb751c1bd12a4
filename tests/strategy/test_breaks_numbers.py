"""Modules and hooks that once trained to other numbers than in one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.modules import VOCABULARY, TinyLM
from tests.ranks.pool import RankPool
from tests.strategy.test_trainer import Data
from tests.trainers import quiet, whole, zero

TRAINER = {"backend": None, "timeout": 50.0}


class Descending(TinyLM):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


class SkipsEverySecondStep(Descending):
    """An `optimizer_step` that computes gradients and does not use them."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


class ChannelsLast(Descending):
    """Weights that are not contiguous: a convolution in channels_last, a transposed matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.head.weight = nn.Parameter(torch.randn(8, VOCABULARY).t())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.second(self.convolution(x[:, None])).mean(1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Empty(Descending):
    """Parameters without elements, with one, and with fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0))
        self.no_rows = nn.Parameter(torch.zeros(0, 4))
        self.no_columns = nn.Parameter(torch.zeros(3, 0))
        self.one = nn.Parameter(torch.ones(1, 1))
        self.two = nn.Parameter(torch.ones(2, 8))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.one + self.two.sum(0) + self.none.sum() + self.no_rows.sum() + self.no_columns.sum()
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Fourier(Descending):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64) / 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=8)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Penalized(Descending):
    """The gradient of a gradient: the inner backward runs inside the step, and a forward follows it."""

    def penalized(self, batch: Tensor) -> Tensor:
        x = inputs = self.embed(batch).detach().requires_grad_()
        for layer in self.layers:
            x = layer(x)
        (grad,) = torch.autograd.grad(self.head(x).sum(), inputs, create_graph=True)
        return 0.01 * grad.pow(2).sum(-1).mean() + self.loss(batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.penalized(batch)


class PenalizedByHand(Penalized):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            loss = self.penalized(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


def _weights(rank: int, kind: type[TinyLM], stage: int | None, ranks: int, arguments: dict[str, Any]) -> Any:
    arguments = {"max_epochs": 2, **arguments}
    trainer = quiet(**arguments) if stage is None else zero(stage, ranks, **arguments)
    module = kind()
    trainer.fit(module, Data(count=24, global_batch=6))
    return whole(module)


def _same(pool: RankPool, kind: type[TinyLM], stage: int, world: int = 2, **arguments: Any) -> None:
    one = pool(1, _weights, kind, None, 1, arguments, **TRAINER, env={"WORLD_SIZE": None})[0]
    for found in pool(world, _weights, kind, stage, world, arguments, **TRAINER):
        for name, expected in one.items():
            difference = (found[name] - expected).abs()
            assert not expected.numel() or difference.max() <= 2e-5 * expected.abs().max(), name


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_step_whose_gradients_are_not_used_leaves_the_next_one_alone(ranks: RankPool, stage: int) -> None:
    _same(ranks, SkipsEverySecondStep, stage)


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_that_are_not_contiguous_train_alike(ranks: RankPool, stage: int) -> None:
    _same(ranks, ChannelsLast, stage)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_weights_without_elements_train_alike(ranks: RankPool, stage: int, world: int) -> None:
    _same(ranks, Empty, stage, world)


@pytest.mark.parametrize("stage", [0, 3])
def test_complex_weights_keep_their_imaginary_part_in_double_precision(ranks: RankPool, stage: int) -> None:
    _same(ranks, Fourier, stage, precision="64-true")


@pytest.mark.parametrize("kind", [Penalized, PenalizedByHand])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_gradient_penalty_equals_one_process(ranks: RankPool, stage: int, kind: type[TinyLM]) -> None:
    _same(ranks, kind, stage)

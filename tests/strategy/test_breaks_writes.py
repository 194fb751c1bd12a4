"""Weights that hooks and steps write themselves: momentum teachers, limits on weights."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.modules import TinyLM
from tests.ranks.pool import RankPool
from tests.strategy.test_breaks_numbers import Descending, _same

STAGES = [0, 1, 2, 3]


class Taught(Descending):
    """A student and a frozen teacher that is its moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.ModuleList(copy.deepcopy(layer) for layer in self.layers).requires_grad_(False)
        self.teacher_embed = copy.deepcopy(self.embed).requires_grad_(False)

    def pairs(self) -> Any:
        return [
            *zip(self.teacher.parameters(), self.layers.parameters(), strict=True),
            *zip(self.teacher_embed.parameters(), self.embed.parameters(), strict=True),
        ]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        target, found = self.teacher_embed(batch), self.embed(batch)
        for teacher, student in zip(self.teacher, self.layers, strict=True):
            target, found = teacher(target), student(found)
        return (found - 2 * target).pow(2).mean()  # type: ignore[no-any-return]


class InTheStep(Taught):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for teacher, student in self.pairs():
                teacher.mul_(0.9).add_(student, alpha=0.1)
        return super().training_step(batch, batch_idx)


class InTheStepThroughData(Taught):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for teacher, student in zip(self.teacher_embed.parameters(), self.embed.parameters(), strict=True):
            teacher.data = teacher.data * 0.9 + student.data * 0.1
        for teacher, student in self.pairs():
            teacher.data.mul_(0.9).add_(student.data, alpha=0.1)
        return super().training_step(batch, batch_idx)


class BetweenSteps(Taught):
    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            for teacher, student in self.pairs():
                teacher.lerp_(student, 0.1)


class Limited(Descending):
    """Weights are limited after each of two steps by hand, as in a Wasserstein GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            for parameter in self.parameters():
                parameter.data.clamp_(-0.2, 0.2)


@pytest.mark.parametrize("kind", [InTheStep, InTheStepThroughData, BetweenSteps, Limited])
@pytest.mark.parametrize("stage", STAGES)
def test_weights_that_the_module_writes_itself_equal_one_process(
    ranks: RankPool, stage: int, kind: type[TinyLM]
) -> None:
    _same(ranks, kind, stage)


class AssignedOutside(Taught):
    def on_train_batch_end(self, *_: Any) -> None:
        for teacher, student in self.pairs():
            teacher.data = teacher.data * 0.9 + student.data * 0.1


class LimitedThroughData(Descending):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("stage", STAGES)
def test_data_assigned_between_steps_is_kept(ranks: RankPool, stage: int) -> None:
    _same(ranks, AssignedOutside, stage)


_NO_TRACE = "writes through .data to trained weights that are gathered for the step leave no trace"


@pytest.mark.parametrize("stage", [1, 2, pytest.param(3, marks=pytest.mark.xfail(strict=True, reason=_NO_TRACE))])
def test_trained_weights_limited_through_data_in_the_step_are_kept(ranks: RankPool, stage: int) -> None:
    _same(ranks, LimitedThroughData, stage)

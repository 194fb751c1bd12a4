"""A module whose blocks sleep, trained by a real Trainer: how long whole steps take, with more ranks than cores."""

import time
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_5d import FiveD, PipelineParallel
from lightning_5d.pipeline_parallel.deferred_weights import WeightQueue
from tests.trainers import quiet


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class Sleeper(nn.Module):
    """F and B take `seconds` each; W does under `slow_weights`."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(self.linear(x), self.seconds)


class Sleepers(L.LightningModule):
    def __init__(self, blocks: int, seconds: float, logs: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sleeper(seconds) for _ in range(blocks))
        self.logs = logs

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        loss = batch.square().mean()
        if self.logs:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clock(L.Callback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.times.append(time.perf_counter())


def fit_timed(
    rank: int, schedule: str, late: bool, ranks: int, microbatches: int, seconds: float, steps: int, logs: bool = True
) -> list[float]:
    """When each step has ended on this rank."""
    per_rank = 2 if schedule in ("zb_v", "v_half", "v_min") else 1
    seconds /= per_rank
    run = WeightQueue.run

    def slow(self: WeightQueue) -> None:
        time.sleep(seconds * bool(len(self)))
        run(self)

    WeightQueue.run = slow  # type: ignore[method-assign]
    try:
        clock = Clock()
        pipeline = PipelineParallel(
            ranks, schedule=schedule, microbatches=microbatches, split="blocks", post_validation=late
        )
        trainer = quiet(
            strategy=FiveD(pipeline),
            devices=ranks,
            gradient_clip_val=1e9,
            callbacks=[clock],
            use_distributed_sampler=False,
            max_steps=steps,
        )
        trainer.fit(
            Sleepers(ranks * per_rank, seconds, logs),
            DataLoader(torch.randn(microbatches * (steps + 1), 4), microbatches),
        )
    finally:
        WeightQueue.run = run  # type: ignore[method-assign]
    return clock.times

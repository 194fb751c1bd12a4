"""Stages made of timed sleeps: the real executor's bubble, with more ranks than cores."""

import time
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_5d.mesh import AXES, ParallelMesh
from lightning_5d.pipeline_parallel.channels import Channels
from lightning_5d.pipeline_parallel.executor import Executor, Work
from lightning_5d.pipeline_parallel.program import program_of
from lightning_5d.pipeline_parallel.schedule import Schedule
from lightning_5d.pipeline_parallel.stage import Boundary, Finished
from lightning_5d.pipeline_parallel.trace import Recorder


class _Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: "Stages") -> Tensor:
        ctx.stage = stage
        time.sleep(stage.seconds)
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.stage.seconds)
        if not ctx.stage.split:
            time.sleep(ctx.stage.seconds)
        return grad, None


class Stages:
    """Takes the place of the cut and of the split backward: F, B and W take `seconds` each."""

    def __init__(self, count: int, seconds: float) -> None:
        self.count, self.seconds, self.split = count, seconds, False
        self.weights_run = 0

    def run(self, stage: int, step: Any, args: Any, kwargs: Any, received: Any, outline: Any) -> Boundary | Finished:
        x = torch.zeros(1, requires_grad=True) if stage == 0 else received
        y = _Sleeping.apply(x, self)
        return Finished(y.sum()) if stage == self.count - 1 else Boundary(y)

    def outline(self) -> None:
        return None

    @contextmanager
    def collecting(self) -> Any:
        self.split = True
        try:
            yield _Queue(self)
        finally:
            self.split = False


class _Queue:
    def __init__(self, stages: Stages) -> None:
        self.stages = stages

    def run(self) -> None:
        time.sleep(self.stages.seconds)
        self.stages.weights_run += 1


def run_timed(rank: int, schedule: Schedule, seconds: float, repeats: int) -> dict[str, Any]:
    """One rank: what it did in several steps in a row, without a barrier between them, and the peak of live activations."""
    timeout = timedelta(seconds=30)
    mesh = ParallelMesh.create(dict.fromkeys(AXES, 1) | {"pp": schedule.ranks}, "cpu", timeout)
    stages = Stages(schedule.stages, seconds * schedule.ranks / schedule.stages)
    channels = Channels.open(mesh, torch.device("cpu"), timeout)
    executor = Executor(stages, channels, [], stages, torch.device("cpu"))  # type: ignore[arg-type]
    program = program_of(schedule, rank, schedule.microbatches, True)
    work = [Work((i,), {}, "all", lambda stage: nullcontext()) for i in range(schedule.microbatches)]
    start = lambda microbatch, output: (output, torch.ones(()))  # noqa: E731
    executor.recorder = Recorder()
    dist.barrier()
    steps, outputs = [], {}
    for _ in range(repeats):
        outputs = executor.run(program, work, lambda *a: None, start)
        steps.append(executor.recorder.take())
    channels.close()
    found = {microbatch: float(value.detach()) for microbatch, value in outputs.items()}
    return {"steps": steps, "peak": executor.peak_live, "outputs": found, "weights": stages.weights_run}

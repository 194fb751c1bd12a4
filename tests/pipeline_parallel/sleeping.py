"""A pipeline whose stages sleep: it runs any schedule with real messages, and trains nothing."""

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_5d.parallelism import Parallelism, Parallelized
from lightning_5d.pipeline_parallel import Action, Kind, Schedule, make_schedule
from lightning_5d.pipeline_parallel.schedule import flatten
from lightning_5d.pipeline_parallel.trace import Recorder
from tests.pipeline_parallel.traces import LIVE, neighbours


@dataclass(frozen=True)
class Sleeping(Parallelism):
    """Every action takes `seconds`, a fused backward twice as long; `late` is slept before the first forward of rank 0."""

    axis = "pipeline"
    order = 10
    size: int = 2
    schedule: str = "1f1b"
    microbatches: int = 4
    seconds: float = 0.004

    def mesh_sizes(self):
        return {"pp": self.size}

    def parallelize(self, module, plan, mesh, dtypes):
        return Asleep(make_schedule(self.schedule, self.size, self.microbatches), mesh, self.seconds)


class Asleep(Parallelized):
    def __init__(self, schedule: Schedule, mesh: Any, seconds: float) -> None:
        self.recorder: Recorder | None = None
        self.schedule: Any = schedule
        self.mesh, self.seconds, self.rank = mesh, seconds, mesh.rank("pp")
        self.recorded: list[bool] = []

    def call(self, step, args, kwargs):
        output = step(*args, **kwargs)
        if torch.is_grad_enabled():
            self.recorded.append(self.recorder is not None)
            self.play(self.recorder or Recorder())
        return output

    def play(self, recorder: Recorder) -> None:
        works, live = [], 0
        for action in flatten(self.schedule.rows[self.rank]):
            source, target = neighbours(self.schedule, self.rank, action)
            message = torch.zeros(4)
            if source is not None:
                mark = recorder.begin()
                self.wait(dist.irecv(message, group=self.mesh.group("pp"), group_src=source[0], tag=tag(*source[1:])))
                recorder.end(mark, "receive", action.stage, action.microbatch, live, peer=source[0], nbytes=16)
            mark = recorder.begin()
            time.sleep(self.seconds * (2 if action.kind is Kind.BACKWARD else 1))
            live += LIVE[action.kind]
            recorder.end(mark, action.kind, action.stage, action.microbatch, live)
            if target is not None:
                mark = recorder.begin()
                works.append(
                    dist.isend(message, group=self.mesh.group("pp"), group_dst=target[0], tag=tag(*target[1:]))
                )
                recorder.end(mark, "send", target[1], action.microbatch, live, peer=target[0], nbytes=16)
        for work in works:
            self.wait(work)

    @staticmethod
    def wait(work: Any) -> None:
        assert work.wait()


def tag(stage: int, microbatch: int, gradient: bool) -> int:
    return 1000 * stage + 2 * microbatch + gradient


__all__ = ["Action", "Asleep", "Sleeping"]

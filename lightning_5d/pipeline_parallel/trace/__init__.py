"""What a pipeline really did in a step: recorded on each rank, brought together on one clock, compared with the plan."""

from lightning_5d.pipeline_parallel.trace.recorder import Event, Mark, Recorder
from lightning_5d.pipeline_parallel.trace.step import Idle, StepTrace

__all__ = ["Event", "Idle", "Mark", "Recorder", "StepTrace"]

"""Callbacks for training runs; each works under any strategy."""

from lightning_5d.callbacks.expert_load import ExpertLoad
from lightning_5d.callbacks.gradient_clipping import GradientClipping
from lightning_5d.callbacks.loss_plot import LossPlot
from lightning_5d.callbacks.loss_scale_monitor import LossScaleMonitor
from lightning_5d.callbacks.memory_profiler import MemoryProfiler
from lightning_5d.callbacks.pipeline_trace import PipelineTrace
from lightning_5d.callbacks.progress import Progress
from lightning_5d.callbacks.text_sample import TextSample
from lightning_5d.callbacks.throughput import Throughput

__all__ = [
    "ExpertLoad",
    "GradientClipping",
    "LossPlot",
    "LossScaleMonitor",
    "MemoryProfiler",
    "PipelineTrace",
    "Progress",
    "TextSample",
    "Throughput",
]

"""Five-dimensional parallel training for PyTorch Lightning: `Trainer(strategy=FiveD(...))`."""

from lightning_5d.activation_checkpointing import ActivationCheckpointing
from lightning_5d.context_parallel.context import ContextParallel
from lightning_5d.data_parallel.zero import ZeRO
from lightning_5d.expert_parallel.expert import ExpertParallel
from lightning_5d.loss_scaling import LossScaling
from lightning_5d.parallelism import Parallelism, Problem, RunContext
from lightning_5d.pipeline_parallel.pipeline import PipelineParallel
from lightning_5d.plan import ParallelPlan
from lightning_5d.precision import FiveDPrecision
from lightning_5d.registry import register_strategies
from lightning_5d.skipped_steps import SkippedStep, SkippedSteps
from lightning_5d.strategy import FiveD
from lightning_5d.tensor_parallel.tensor import TensorParallel

__all__ = [
    "ActivationCheckpointing",
    "ContextParallel",
    "ExpertParallel",
    "FiveD",
    "FiveDPrecision",
    "LossScaling",
    "ParallelPlan",
    "Parallelism",
    "PipelineParallel",
    "Problem",
    "RunContext",
    "SkippedStep",
    "SkippedSteps",
    "TensorParallel",
    "ZeRO",
]

register_strategies()

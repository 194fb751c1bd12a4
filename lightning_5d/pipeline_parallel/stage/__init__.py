"""The cut: one module divided into stages, whose steps stay as the user wrote them."""

from lightning_5d.pipeline_parallel.stage.costs import StageCosts, estimate_costs
from lightning_5d.pipeline_parallel.stage.cut import Boundary, Cut, Finished
from lightning_5d.pipeline_parallel.stage.layout import Anatomy, Place, StageLayout, dissect
from lightning_5d.pipeline_parallel.stage.measure import measure_costs
from lightning_5d.pipeline_parallel.stage.outline import Outline, TensorOutline
from lightning_5d.pipeline_parallel.stage.placeholders import is_placeholder
from lightning_5d.pipeline_parallel.stage.problems import layout_of, layout_problems, split_problems
from lightning_5d.pipeline_parallel.stage.split import partition

__all__ = [
    "Anatomy",
    "Boundary",
    "Cut",
    "Finished",
    "Outline",
    "Place",
    "StageCosts",
    "StageLayout",
    "TensorOutline",
    "dissect",
    "estimate_costs",
    "is_placeholder",
    "layout_of",
    "layout_problems",
    "measure_costs",
    "partition",
    "split_problems",
]

"""Which operations all ranks of the tensor axis do alike, for counts of a model's operations."""

from __future__ import annotations

from torch import nn

from lightning_5d.names import plain_name
from lightning_5d.tensor_parallel.layout import TensorLayout


def shares_of_work(module: nn.Module, layout: TensorLayout, ranks: int) -> dict[nn.Module, float]:
    """See `lightning_5d.parallelism.Parallelized.shares_of_work`.

    Args:
        module: The user's, cut.
        layout: How it is cut.
        ranks: Ranks of the axis.
    """
    regions = {region.name for region in layout.regions}
    blocks = () if layout.sequence is None else layout.sequence.blocks
    found = {}
    for name, child in module.named_modules():
        name = plain_name(name)
        own = [f"{name}.{key}" if name else key for key, parameter in child.named_parameters(recurse=False)]
        cut = [layout.weights[key] for key in own if key in layout.weights]
        in_pieces = any(name == block or name.startswith(f"{block}.") for block in blocks)
        if cut:
            # Less where some rows are on several ranks, or nothing but padding.
            found[child] = max(rows.whole / rows.stored for rows in cut)
        elif name in regions or (own and in_pieces):
            found[child] = 1.0
        elif own:
            found[child] = 1.0 / ranks
    return found

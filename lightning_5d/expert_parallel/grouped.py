"""Products of rows with the matrix of their expert."""

from __future__ import annotations

from torch import Tensor


def grouped_linear(rows_SI: Tensor, weights_MOI: Tensor, counts_M: Tensor) -> Tensor:
    """Each row times the transposed matrix of its expert, (S, O); rows are sorted by expert.

    Args:
        rows_SI: Rows.
        weights_MOI: A matrix for each expert, as `torch.nn.Linear` has them.
        counts_M: Rows of each expert, integers on the CPU, adding up to S; may be 0.
    """
    raise NotImplementedError

"""Layers of the reference models that both dense blocks and blocks of experts have."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Projection(nn.Linear):
    """A linear layer without bias whose weights start from a normal distribution."""

    def __init__(self, in_features: int, out_features: int, std: float) -> None:
        # Before the base constructor, because that one calls reset_parameters.
        self.std = std
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        nn.init.normal_(self.weight, std=self.std)


class SwiGLU(nn.Module):
    """The gated feed-forward layer down(silu(gate(x)) * up(x)) (arXiv:2002.05202).

    Args:
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside.
        std: Standard deviation of the weights at the start.
        down_std: That of the layer that writes to the residual stream.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, std: float, down_std: float) -> None:
        super().__init__()
        self.gate_proj = Projection(hidden_size, intermediate_size, std)
        self.up_proj = Projection(hidden_size, intermediate_size, std)
        self.down_proj = Projection(intermediate_size, hidden_size, down_std)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Transform (..., D) at each position alone."""
        out_BTD: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return out_BTD

"""The layer itself: a router, its experts, and those that every token goes to."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_5d.expert_parallel.balance import Losses, routing_losses
from lightning_5d.expert_parallel.config import MoEConfig
from lightning_5d.expert_parallel.counted import Counted
from lightning_5d.expert_parallel.experts import Experts
from lightning_5d.expert_parallel.routing import TopKRouter
from lightning_5d.feed_forward import Projection, SwiGLU

# [Note: shared experts while tokens travel]
# Shared experts wait for no token, so they could be computed between `dispatch.Way.start_dispatch` and `arrived`. Where ranks copy from each
# other's memory there is nothing to gain, as the receiver does the work; with all-to-all there is. The door would set out before
# ``self.experts(...)`` is called, as it needs no weights for that; but what has set out has to be an *input* of that call, a ticket in place of the hidden
# states: FSDP2 takes the gradients of the inputs of the experts' call for the sign that those of their weights are complete, and would reduce them
# before they are there if tokens went past it.


class MoE(nn.Module):
    """A mixture of experts in the place of a feed-forward layer, in plain torch; parts are named as in Hugging Face's models.

    Args:
        hidden_size: Width of the residual stream.
        config: Sizes and routing.
        std: Standard deviation of the weights at the start.
        down_std: That of those that write to the residual stream.

    Attributes:
        gate: The router.
        experts: The experts that tokens are sent to.
        shared_experts: Those that all tokens go to, as one; there only if configured.
        shared_expert_gate: What weights these, (1, D); there only if configured.
    """

    def __init__(self, hidden_size: int, config: MoEConfig, std: float = 0.02, down_std: float = 0.02) -> None:
        super().__init__()
        self.config = config
        self.gate = TopKRouter(hidden_size, config, std)
        self.experts = Experts(hidden_size, config, std, down_std)
        if config.shared:
            self.shared_experts = SwiGLU(hidden_size, config.shared * config.intermediate_size, std, down_std)
        if config.shared_gate:
            self.shared_expert_gate = Projection(hidden_size, 1, std)

    @property
    def counted(self) -> Counted:
        """Which rows count, and sums over other ranks, if any. The axes put another one here, for the router as well."""
        return self.gate.counted

    @counted.setter
    def counted(self, counted: Counted) -> None:
        self.gate.counted = counted

    def forward(self, x_BTD: Tensor) -> Tensor | tuple[Tensor, Losses]:
        """Transforms (B, T, D) at each position alone.

        Returns:
            (B, T, D), and where the config has losses these, to be added to the loss.
        """
        hidden_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        routed = self.gate(hidden_ND)
        out_BTD: Tensor = self.experts(hidden_ND, routed.index_NK, routed.weights_NK).view_as(x_BTD)
        if self.config.shared:
            shared_BTD = self.shared_experts(x_BTD)
            if self.config.shared_gate:
                shared_BTD = shared_BTD * self.shared_expert_gate(x_BTD).sigmoid()
            out_BTD = out_BTD + shared_BTD
        if not self.config.losses:
            return out_BTD
        return out_BTD, routing_losses(self.gate, routed, len(x_BTD) if x_BTD.ndim > 2 else 1)

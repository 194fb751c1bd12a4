"""The layer itself: a router, its experts, and those that every token goes to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_5d.expert_parallel.balance import Losses, routing_losses
from lightning_5d.expert_parallel.config import MoEConfig
from lightning_5d.expert_parallel.counted import Counted
from lightning_5d.expert_parallel.experts import Experts
from lightning_5d.expert_parallel.routing import TopKRouter
from lightning_5d.feed_forward import Projection, SwiGLU

# [Note: shared experts while tokens travel]
# Shared experts wait for no token, so where experts are on other ranks they are computed between the start of the way there and its end; backward,
# their gradients are between the start of the way back of gradients and its end, as the engine takes what was made last first. The call of the
# experts gets them as a function, and its inputs stay what they are: FSDP2 takes the gradients of these for the sign that those of the experts'
# weights are complete, and would reduce them before they are there if tokens went past the call.
# On the way there, and not on the way back: then they come before the experts, as they do where nobody can wait (`ExpertDoor.travels` says so:
# in a first step that is looked at, say), and a block that is run again in backward saves its tensors in one order whichever it is. Where backward
# adds up the gradients of the layer's input the order is the same, too, to the last bit.
# A compiled layer computes them before: what experts that are spread call is not compiled.


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
        tokens = hidden_ND, routed.index_NK, routed.weights_NK
        out_BTD: Tensor
        if not self.config.shared:
            out_BTD = self.experts(*tokens).view_as(x_BTD)
        elif self._travels(hidden_ND):
            shared: list[Tensor] = []
            out_BTD = self.experts(*tokens, meanwhile=lambda: shared.append(self._shared(x_BTD))).view_as(x_BTD)
            out_BTD = out_BTD + shared.pop()
        else:
            shared_BTD = self._shared(x_BTD)
            out_BTD = self.experts(*tokens).view_as(x_BTD) + shared_BTD
        if not self.config.losses:
            return out_BTD
        return out_BTD, routing_losses(self.gate, routed, len(x_BTD) if x_BTD.ndim > 2 else 1)

    def _travels(self, hidden_ND: Tensor) -> bool:
        """Whether tokens are on their way for a time, in which something else can be computed."""
        if torch.compiler.is_compiling():
            return False
        # The forward that an axis has put there; any other has no such method.
        travels = getattr(self.experts.forward, "travels", None)
        return travels is not None and bool(travels(hidden_ND))

    def _shared(self, x_BTD: Tensor) -> Tensor:
        shared_BTD: Tensor = self.shared_experts(x_BTD)
        if self.config.shared_gate:
            shared_BTD = shared_BTD * self.shared_expert_gate(x_BTD).sigmoid()
        return shared_BTD

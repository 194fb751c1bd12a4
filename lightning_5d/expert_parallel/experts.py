"""Experts whose weights are stacked.

Shape suffixes: N tokens, D hidden size, I width inside an expert, E experts, M those of this rank, K experts of a token, S rows sorted by expert.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from lightning_5d.expert_parallel.config import MoEConfig
from lightning_5d.expert_parallel.dispatch import through_experts
from lightning_5d.expert_parallel.found import FoundExperts
from lightning_5d.expert_parallel.grouped import grouped_linear


class Experts(nn.Module):
    """All experts of a layer, each a SwiGLU; the same names, shapes and call as Hugging Face's.

    Args:
        hidden_size: D.
        config: How many, how wide.
        std: Standard deviation of the weights at the start.
        down_std: That of those that write to the residual stream.

    Attributes:
        gate_up_proj: (E, 2I, D), the gate's rows before the others.
        down_proj: (E, D, I).
    """

    def __init__(self, hidden_size: int, config: MoEConfig, std: float = 0.02, down_std: float = 0.02) -> None:
        super().__init__()
        self.std, self.down_std = std, down_std
        self.num_experts, self.top_k = config.experts, config.top_k
        inner = config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(config.experts, 2 * inner, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(config.experts, hidden_size, inner))
        self.act_fn = nn.SiLU()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights anew."""
        nn.init.normal_(self.gate_up_proj, std=self.std)
        nn.init.normal_(self.down_proj, std=self.down_std)

    def forward(self, hidden_ND: Tensor, index_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """The weighted sum of what each token's experts make of it.

        Args:
            hidden_ND: Tokens.
            index_NK: The experts of each.
            weights_NK: Their weights.

        Returns:
            (N, D), in the dtype of `hidden_ND`.
        """
        return through_experts(hidden_ND, index_NK, weights_NK, self.num_experts, partial(compute_experts, self))

    def extra_repr(self) -> str:
        """What a person sees of it."""
        experts, double, hidden = self.gate_up_proj.shape
        return f"{experts} experts, {hidden}, {double // 2}"


def is_plain(module: nn.Module) -> TypeGuard[Experts]:
    """Whether a module is such a one as it was made: with its own forward, and its own weights."""
    if not isinstance(module, Experts) or type(module).forward is not Experts.forward:
        return False
    return sorted(name for name, _ in module.named_parameters()) == ["down_proj", "gate_up_proj"]


def described(name: str, module: Experts) -> FoundExperts:
    """Such a module, as a part of a whole one."""
    return FoundExperts(
        name=name,
        module=module,
        count=module.num_experts,
        top_k=module.top_k,
        stacked=("gate_up_proj", "down_proj"),
        compute=compute_experts,
        tensor_dims={"gate_up_proj": 1, "down_proj": 2},
        halves=frozenset({"gate_up_proj"}),
    )


def compute_experts(module: nn.Module, rows_SD: Tensor, counts_M: Tensor) -> Tensor:
    """What experts make of rows sorted by expert, (S, D); the `lightning_5d.expert_parallel.found.Compute` of `Experts`."""
    # By plain attributes: while a step runs, what is there may be a tensor that is no parameter.
    experts: Any = module
    gate_SI, up_SI = grouped_linear(rows_SD, experts.gate_up_proj, counts_M).chunk(2, -1)
    return grouped_linear(experts.act_fn(gate_SI) * up_SI, experts.down_proj, counts_M)

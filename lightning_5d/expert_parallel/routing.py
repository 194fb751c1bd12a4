"""Which experts a token is sent to, and what weights their results get.

Shape suffixes: N tokens, D hidden size, E experts, K experts of a token, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_5d.expert_parallel.config import MoEConfig
from lightning_5d.expert_parallel.counted import Counted
from lightning_5d.expert_parallel.load import choices_per_expert
from lightning_5d.hidden_operations import hidden_operations
from lightning_5d.repeated_runs import is_repeated


class Routed(NamedTuple):
    """What a router says of N tokens. All numbers are fp32.

    Attributes:
        index_NK: The experts of each token.
        weights_NK: Their weights.
        logits_NE: What scores were made of.
        scores_NE: What weights were taken from: softmax or sigmoid of the logits, without any bias.
        real_N: Which rows are tokens; ``None`` if all are.
    """

    index_NK: Tensor
    weights_NK: Tensor
    logits_NE: Tensor
    scores_NE: Tensor
    real_N: Tensor | None


class TopKRouter(nn.Module):
    """A linear layer whose best scores choose the experts of a token; all in fp32.

    Args:
        hidden_size: D.
        config: How tokens choose.
        std: Standard deviation of the weights at the start.

    Attributes:
        weight: (E, D).
        expert_bias: (E,), added to scores for the choice alone; ``None`` without. fp32 whatever dtype the module is converted to.
        load: (E,), how often this rank's tokens have chosen each expert in training, since somebody took it back to 0 (see `balance_by_bias`).
        counted: Which rows count; other ranks, if any.

    Source: scores, normalised weights: Jiang et al., "Mixtral of Experts" (arXiv:2401.04088); sigmoid, bias, groups, scale: DeepSeek-AI,
    "DeepSeek-V3" (arXiv:2412.19437), section 2.1.2, as Hugging Face computes it.
    """

    full_precision: ClassVar[bool] = True
    """See `lightning_5d.module_casting.keeps_full_precision`."""

    expert_bias: Tensor | None
    load: Tensor

    def __init__(self, hidden_size: int, config: MoEConfig, std: float = 0.02) -> None:
        super().__init__()
        self.config, self.std = config, std
        self.counted = Counted()
        self.load_everywhere: Tensor | None = None
        self.weight = nn.Parameter(torch.empty(config.experts, hidden_size))
        bias = torch.zeros(config.experts, dtype=torch.float32) if config.bias_rate is not None else None
        self.register_buffer("expert_bias", bias)
        # A buffer, so that it is where the weights are, and a part that is computed again in backward finds and leaves it as it was.
        self.register_buffer("load", torch.zeros(config.experts, dtype=torch.int64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights anew, and takes bias and load back to 0."""
        nn.init.normal_(self.weight, std=self.std)
        self.load.zero_()
        if self.expert_bias is not None:
            nn.init.zeros_(self.expert_bias)

    def forward(self, hidden_ND: Tensor) -> Routed:
        """Chooses the experts of tokens (N, D)."""
        config = self.config
        # Padding may hold anything; here it is tokens of zeros.
        real_N = self.counted.real(len(hidden_ND))
        with torch.autocast(hidden_ND.device.type, enabled=False):
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            x_ND = hidden_ND.to(wide)
            if real_N is not None:
                x_ND = torch.where(real_N[:, None], x_ND, 0)
            logits_NE = F.linear(x_ND, self.weight.to(wide))
            scores_NE = logits_NE.softmax(-1) if config.scores == "softmax" else logits_NE.sigmoid()
            index_NK = choose(scores_NE.detach(), self.expert_bias, config.top_k, config.groups, config.top_groups)
            weights_NK = scores_NE.gather(-1, index_NK)
            if config.normalize:
                # Sigmoids may all be 0.
                weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
            if config.scale != 1:
                weights_NK = weights_NK * config.scale
        if self.training and not is_repeated():
            with uncounted():
                self.load += choices_per_expert(index_NK, config.experts, real_N)
        return Routed(index_NK, weights_NK, logits_NE, scores_NE, real_N)

    def extra_repr(self) -> str:
        """What a person sees of it."""
        config = self.config
        return f"{self.weight.shape[1]}, experts={config.experts}, top_k={config.top_k}, scores={config.scores!r}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # A step of a bias, 0.001 say, is nothing beside 1 in 16 bits. So only its device may change.
        before = self.expert_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = self.expert_bias
        if before is not None and after is not None and after.dtype != before.dtype:
            self.expert_bias = after.to(before.dtype) if before.is_meta or after.is_meta else before.to(after.device)
        return self


@torch.no_grad()
def choose(scores_NE: Tensor, bias_E: Tensor | None, top_k: int, groups: int = 1, top_groups: int = 1) -> Tensor:
    """The experts with the best scores, best first, as (N, K).

    Args:
        scores_NE: Scores, of any sign.
        bias_E: Added to them for the choice.
        top_k: K.
        groups: Groups of neighbouring experts, G.
        top_groups: Only experts of so many groups are chosen: of those with the best sum of their two best.
    """
    if bias_E is not None:
        scores_NE = scores_NE + bias_E
    if top_groups < groups:
        scores_NGe = scores_NE.view(len(scores_NE), groups, -1)
        worth_NG = scores_NGe.topk(2, dim=-1).values.sum(-1)
        best_NG = worth_NG.topk(top_groups, dim=-1, sorted=False).indices
        open_NG = torch.zeros_like(worth_NG, dtype=torch.bool).scatter(-1, best_NG, True)
        scores_NE = scores_NGe.masked_fill(~open_NG[..., None], float("-inf")).flatten(-2)
    return scores_NE.topk(top_k, dim=-1).indices


def uncounted() -> AbstractContextManager[None]:
    """A context for what is left out when a forward runs again: selective recomputation knows other operations by their numbers."""
    return nullcontext() if torch.compiler.is_compiling() else hidden_operations()

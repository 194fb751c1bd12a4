"""Losses that keep routers balanced, and their logits small.

Shape suffixes: N tokens, E experts, K experts of a token, S sets of tokens that balance each for itself (one, or the sequences).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_5d.expert_parallel.config import MoEConfig
from lightning_5d.expert_parallel.routing import Routed, TopKRouter, choose, uncounted
from lightning_5d.repeated_runs import is_repeated, reentrant_checkpoint

Losses = dict[str, Tensor]
"""Losses by name, as ``"balance"`` and ``"z"``, scalars in fp32 that are multiplied by their coefficients."""


# [Note: the balance loss]
# coefficient * E * sum over e of f_e * P_e, with f_e the share of choices that went to expert e, and P_e the mean of what its scores are of all
# scores of a token. Perfectly balanced it is the coefficient, whatever K. Gradients go through P alone. (Shazeer et al., 2017; Lepikhin et al.,
# "GShard", arXiv:2006.16668, section 2.2; Fedus et al., "Switch Transformers", arXiv:2101.03961, equation 4. Over all data ranks: Qiu et al.,
# "Demons in the Detail", arXiv:2501.11873, who also take f over the microbatches of a step. Per sequence, from normalised sigmoids: DeepSeek-V3,
# arXiv:2412.19437, equations 17 to 20.)
# That of a sequence comes beside a bias, which already evens out where tokens go. So its f is about the best scores of all (equation 18), whatever
# a bias or groups have made of the choice; else it would see balance, and push no score towards it.
# P is of one microbatch in any case: with f over all of them, the mean over microbatches is the loss of the whole batch. f over microbatches is
# that of those so far, so this is exact where all have the same f, and an estimate of it else.
def routing_losses(router: TopKRouter, routed: Routed, sequences: int = 1) -> Losses:
    """The losses that the router's config asks for, of one microbatch; the same on all ranks that have parts of it.

    Args:
        router: The router.
        routed: What it has just said.
        sequences: How many sequences of equal length its rows are, one after the other.

    Returns:
        Losses in fp32, finite also without a token; empty where none is configured.
    """
    config = router.config
    if not config.losses:
        return {}
    with torch.autocast(routed.logits_NE.device.type, enabled=False):
        sets = sequences if config.balance_scope == "sequence" else 1
        logits_NE, scores_NE = routed.logits_NE, routed.scores_NE
        # Normalised, a softmax stays what it is.
        shares_NE = scores_NE if config.scores == "softmax" else scores_NE / (scores_NE.sum(-1, keepdim=True) + 1e-20)
        z_N1 = logits_NE.logsumexp(-1, keepdim=True).square()
        both_NE1 = torch.cat((shares_NE, z_N1), dim=-1)
        if routed.real_N is not None:
            both_NE1 = torch.where(routed.real_N[:, None], both_NE1, 0)
        load_SE = _load_of_sets(routed, _best(routed, config), sets)
        # One sum over the ranks of the microbatch for everything.
        sums = torch.cat((_by_set(both_NE1, sets), load_SE), dim=-1)
        sums = router.counted.sum_of_microbatch(sums)
        shares_SE, z_S1, load_SE = torch.split(sums, [config.experts, 1, config.experts], dim=-1)
        tokens_S1 = load_SE.detach().sum(-1, keepdim=True) / config.top_k
        losses: Losses = {}
        if config.balance:
            f_SE = load_SE.detach()
            if config.balance_scope == "global" and router.training:
                f_SE = _load_everywhere(router)[None].to(f_SE.dtype)
            f_SE = f_SE / f_SE.sum(-1, keepdim=True).clamp(min=1)
            products_SE: Tensor = _Product.apply(shares_SE / tokens_S1.clamp(min=1), f_SE)  # type: ignore[no-untyped-call]
            filled = (tokens_S1 > 0).sum().clamp(min=1)
            losses["balance"] = config.balance * config.experts * products_SE.sum() / filled
        if config.z:
            # ST-MoE: Zoph et al., arXiv:2202.08906, equation 5.
            losses["z"] = config.z * z_S1.sum() / tokens_S1.sum().clamp(min=1)
        return losses


def added(losses: Losses, more: Losses) -> Losses:
    """The sums of losses of the same name."""
    return {name: losses[name] + more[name] if name in more else losses[name] for name in losses} | {
        name: loss for name, loss in more.items() if name not in losses
    }


def _best(routed: Routed, config: MoEConfig) -> Tensor:
    """The experts of each token (N, K) that f is about."""
    is_otherwise = config.bias_rate is not None or config.top_groups < config.groups
    if config.balance_scope == "sequence" and is_otherwise:
        return choose(routed.scores_NE, None, config.top_k)
    return routed.index_NK


def _load_of_sets(routed: Routed, index_NK: Tensor, sets: int) -> Tensor:
    with torch.no_grad():
        chosen_NE = torch.zeros_like(routed.scores_NE).scatter_(-1, index_NK, 1)
        if routed.real_N is not None:
            chosen_NE *= routed.real_N[:, None]
        return _by_set(chosen_NE, sets)


def _by_set(x_NX: Tensor, sets: int) -> Tensor:
    return x_NX.view(sets, len(x_NX) // sets, x_NX.shape[1]).sum(1)


def _load_everywhere(router: TopKRouter) -> Tensor:
    kept = _kept_by_reentrant(router)
    if is_repeated() and router.load_everywhere is not None:
        if kept:
            kept.append(kept.pop(0))  # a checkpoint inside of another one runs once more
            return kept[-1]
        # Not asked again: the graph that this is for has its own already, see `_Product`.
        return router.load_everywhere
    with uncounted():
        router.load_everywhere = router.counted.sum(router.load.clone(), "global")
    if kept is not None:
        kept.append(router.load_everywhere)
    return router.load_everywhere


def _kept_by_reentrant(router: TopKRouter) -> list[Tensor] | None:
    """The loads so far of a router in each of its calls inside of a reentrant checkpoint; ``None`` outside of one.

    It makes its graph when it runs again. Then forwards of later microbatches may have been here.
    """
    node = None if torch.compiler.is_compiling() else reentrant_checkpoint()
    if node is None:
        return None
    loads: dict[TopKRouter, list[Tensor]] = node.__dict__.setdefault("loads_so_far", {})
    return loads.setdefault(router, [])


class _Product(torch.autograd.Function):
    """A product with a factor that needs no gradient, and that backward has even where everything else is computed again.

    When a later microbatch has run, the load so far is another one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None

"""Balance without a loss: a bias on the choice of experts that follows their load."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_5d.expert_parallel.routing import TopKRouter


def balance_by_bias(module: nn.Module, optimizer: Optimizer, rate: float | None = None) -> RemovableHandle:
    """Moves the bias of each router once in each step that the optimizer makes, and starts to count load anew.

    An expert with less than the mean load gets ``rate`` more, one with more gets ``rate`` less. Load is that of all ranks and of all microbatches
    since the last step. A step that is left out for its gradients' sake moves nothing. Routers without a bias only start to count anew.

    Args:
        module: The module with `TopKRouter` somewhere inside.
        optimizer: The optimizer; with several of them, one.
        rate: How far biases move; that of each router's config if ``None``.

    Returns:
        A handle that ends it.

    Source: DeepSeek-AI, "DeepSeek-V3" (arXiv:2412.19437), section 2.1.2; Wang et al. (arXiv:2408.15664), algorithm 1.
    """
    return optimizer.register_step_post_hook(BiasSteps(module, rate))


class BiasSteps:
    """The hook: a `lightning_5d.scheduling.StepHook`."""

    def __init__(self, module: nn.Module, rate: float | None) -> None:
        self._module, self._rate = module, rate

    def __call__(self, stepped: Optimizer, args: Any, kwargs: Any) -> None:
        """Comes after a step."""
        # A fused optimizer under torch's GradScaler looks by itself whether it steps.
        overflow = getattr(stepped, "found_inf", None)
        if overflow is None or not bool(overflow):
            move_biases(self._module, self._rate)

    def changed(self) -> list[nn.Module]:
        """The routers, whose bias and load are buffers."""
        return [*_routers(self._module)]


@torch.no_grad()
def move_biases(module: nn.Module, rate: float | None = None) -> None:
    """What `balance_by_bias` does after each step; all ranks that have these routers call it together."""
    routers = _routers(module)
    biased = [router for router in routers if router.expert_bias is not None and router.config.bias_rate is not None]
    together: dict[Hashable, list[TopKRouter]] = {}
    for router in biased:
        together.setdefault(router.counted.differing, []).append(router)
    for alike in together.values():
        device = alike[0].load.device
        summed = alike[0].counted.sum(torch.cat([router.load.to(device) for router in alike]), "global")
        loads = torch.split(summed, [router.config.experts for router in alike])
        for router, load_E in zip(alike, loads, strict=True):
            _move(router, router.counted.sum_of_holders(load_E), rate)
    for router in routers:
        router.load.zero_()


def routers_never_restarted(module: nn.Module) -> list[str]:
    """Names of routers that need their load of a step, and still have that of a step that is over."""
    return [
        name
        for name, router in module.named_modules()
        if isinstance(router, TopKRouter)
        and (router.config.bias_rate or (router.config.balance and router.config.balance_scope == "global"))
        and bool(router.load.any())
    ]


def _routers(module: nn.Module) -> list[TopKRouter]:
    # Looked up each time: a stage of a pipeline has only its own.
    return [router for router in module.modules() if isinstance(router, TopKRouter)]


def _move(router: TopKRouter, load_E: Tensor, rate: float | None) -> None:
    bias_E = router.expert_bias
    step = router.config.bias_rate if rate is None else rate
    if bias_E is not None and step:
        # Whole numbers: exactly the mean load moves nothing.
        bias_E.add_(torch.sign(load_E.sum() - len(load_E) * load_E).to(bias_E), alpha=step)

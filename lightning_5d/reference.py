"""The one process that `verify` compares with: Lightning's single-device strategy, one big batch, the same precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from typing_extensions import override

from lightning_5d.loss import weight_of
from lightning_5d.module_casting import ModuleCasting, keeps_full_precision
from lightning_5d.plan import ParallelPlan, find_plan
from lightning_5d.precision import FiveDPrecision


class OneBigBatch(SingleDeviceStrategy):
    """Takes a list of microbatches as one batch: the step's loss is their (weighted) mean.

    Args:
        device: Where it runs.
        compute: Modules compute in this dtype, from a copy of all weights for each microbatch; ``None`` for the weights' own.
        plan: Where the verified strategy cuts, found by itself if ``None``: blocks cast their inputs.
        ranks: Data ranks of the verified strategy. There each microbatch's gradients are in 16 bits before they are divided by
            it, so they are here, or other values would overflow.
    """

    def __init__(
        self,
        device: torch.device,
        compute: torch.dtype | None = None,
        plan: ParallelPlan | None = None,
        ranks: int = 1,
    ) -> None:
        super().__init__(device)
        self._plan = plan
        self._ranks = ranks
        self._compute = compute
        self._casting: ModuleCasting | None = None

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        if self._compute is not None and module is not None:
            plan = find_plan(module, self._plan)
            blocks = [module.get_submodule(name) for name in plan.block_names(module)]
            self._casting = ModuleCasting(module, blocks, self._compute)
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(lambda gradient: gradient / self._ranks)  # type: ignore[no-untyped-call]
        super().setup(trainer)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        microbatches, *rest = args
        module: Any = self.lightning_module
        losses: list[Tensor] = []
        weights: list[float] = []
        for microbatch in microbatches:
            with ExitStack() as contexts:
                contexts.enter_context(self.precision_plugin.train_step_context())
                if self._casting is not None and self._compute is not None:
                    contexts.enter_context(self._casting.step())
                    contexts.enter_context(_copies_of_weights(module, self._compute))
                output = module.training_step(microbatch, *rest, **kwargs)
            weight = weight_of(output)
            if weight != 0.0:
                loss = output["loss"] if isinstance(output, Mapping) else output
                if self._compute is not None and loss.requires_grad:
                    loss.register_hook(lambda gradient: gradient * self._ranks)
                losses.append(loss)
                weights.append(1.0 if weight is None else weight)
        total = torch.stack([loss * weight for loss, weight in zip(losses, weights, strict=True)]).sum()
        return total / sum(weights)


class _AlwaysUnscaling(MixedPrecision):
    """Lightning's plugin, which leaves it to fused optimizers to unscale, and then cannot clip; gradients are true here."""

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self.scaler is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = closure()
        self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return result

    @override
    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        Precision.clip_gradients(self, *args, **kwargs)


def reference_precision(plugin: FiveDPrecision, device: torch.device) -> dict[str, Any]:
    """Trainer arguments for the same precision without `FiveD`."""
    if plugin.compute_dtype is None:
        return {"precision": plugin.precision}
    scaler = None
    if plugin.precision == "16-mixed":
        settings = plugin.scaler.settings if plugin.scaler is not None else None
        scaler = torch.amp.GradScaler(
            device.type,
            init_scale=settings.init_scale if settings else 1.0,
            growth_factor=settings.growth_factor if settings else 2.0,
            backoff_factor=settings.backoff_factor if settings else 0.5,
            growth_interval=settings.growth_interval if settings else 2**31 - 1,
        )
    # Handed over itself: of the string, Lightning makes bf16 on CPU.
    return {"plugins": _AlwaysUnscaling(plugin.precision, device.type, scaler)}  # type: ignore[arg-type]


@contextmanager
def _copies_of_weights(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Puts copies in the place of weights; their gradients, in `dtype`, are added up in the weights' own."""
    copies: dict[nn.Parameter, Tensor] = {}
    places: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            cast = parameter is not None and parameter.is_floating_point() and parameter.ndim > 0
            if parameter is None or not cast or keeps_full_precision(owner):
                continue
            if parameter not in copies:
                copies[parameter] = parameter.to(dtype)
            places.append((owner._parameters, name, parameter))
    for parameters, name, parameter in places:
        parameters[name] = copies[parameter]
    try:
        yield
    finally:
        for parameters, name, parameter in places:
            parameters[name] = parameter

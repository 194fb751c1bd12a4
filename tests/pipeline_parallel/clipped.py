"""Language models that clip by hand, in every place and by every function that people do it with, and what a run of one leaves."""

from collections.abc import Iterable, Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from lightning_5d.models import LanguageModel
from tests.tensor_parallel.parity import WholeRecord


class Steep(LanguageModel):
    """With plain SGD, of which each step depends on how far gradients are clipped."""

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        return super().loss(batch) * 20

    def configure_optimizers(self) -> Any:
        vectors = [parameter for parameter in self.parameters() if parameter.ndim == 1]
        others = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        return torch.optim.SGD([{"params": vectors}, {"params": others}], lr=0.02)

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters() if parameter.grad is not None]


class AfterBackward(Steep):
    """By value and by the sum of magnitudes, before anything but backward has happened to gradients."""

    def on_after_backward(self) -> None:
        clip_grad_value_(self.parameters(), 0.3)
        self.log("norm", clip_grad_norm_(list(self.parameters()), 20.0, norm_type=1, foreach=False))
        self.log("norm after", get_total_norm(self.gradients(), 1))


class Everywhere(AfterBackward):
    """Then by norm in the hook that is there for gradients, and in place of Lightning in two calls, by the largest element."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("norm in hook", clip_grad_norm_(self.parameters(), 0.2))

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        total = get_total_norm([gradient.detach() for gradient in self.gradients()], float("inf"))
        clip_grads_with_norm_(self.parameters(), 0.01, total)
        self.log("largest", total)


class InParts(Steep):
    """Parts of the model: a layer, a group of the optimizer, all vectors, single tensors; with Lightning's norms of them."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log_dict(grad_norm(self, norm_type=2))
        self.log_dict(grad_norm(self.decoder.layers[-1], "inf", group_separator="."))
        for layer in self.decoder.layers:
            self.log("norm", clip_grad_norm_(layer.parameters(), 0.6))
        clip_grad_norm_(optimizer.param_groups[1]["params"], 0.7)
        clip_grad_norm_([parameter for parameter in self.parameters() if parameter.ndim == 1], 0.1)
        for parameter in self.parameters():
            clip_grad_norm_(parameter, 0.25)

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("norm of the end", grad_norm(self, 1)["grad_1.0_norm_total"])


KINDS: list[type[Steep]] = [Everywhere, InParts]


class Clipped(WholeRecord):
    """Keeps gradients after they were clipped, too."""

    def __init__(self) -> None:
        super().__init__()
        self.clipped: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        super().on_train_batch_end(trainer, module, outputs)
        named = self.named(module)
        self.clipped.append(self.kept(trainer, {n: p.grad for n, p in named.items() if p.grad is not None}))

    def __call__(self) -> dict[str, Any]:
        return {**super().__call__(), "clipped": self.clipped}


def smallest_change(runs: Iterable[Mapping[str, Any]]) -> float:
    """How far the least clipped of all steps was clipped after `on_after_backward`, as a share of the largest gradient."""
    changes = []
    for run in runs:
        for before, after in zip(run["gradients"], run["clipped"], strict=True):
            size = max(float(value.abs().max()) for value in before.values())
            changes.append(max(float((before[n] - after[n]).abs().max()) for n in before) / size)
    return min(changes)

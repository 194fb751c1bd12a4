"""LightningModules whose code calls backward by itself, in all the ways that people do."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.modules import TinyLM


class Attacked(TinyLM):
    """Fast gradient signs on embeddings: a backward for the gradient of an input, then the loss of what it makes."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.found: list[Tensor] = []

    def of_embedded(self, x: Tensor, batch: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())

    def attack(self, batch: Tensor) -> Tensor:
        x = self.embed(batch[:, :-1]).detach().requires_grad_()
        self.of_embedded(x, batch).backward()
        assert x.grad is not None
        return 0.1 * x.grad.sign()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        noise = self.attack(batch)
        loss = self.of_embedded(self.embed(batch[:, :-1]) + noise, batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


class Cleared(Attacked):
    """Clears gradients by itself, as tutorials do."""

    def attack(self, batch: Tensor) -> Tensor:
        self.zero_grad()
        noise = super().attack(batch)
        self.zero_grad()
        return noise


class ClearedByOptimizer(Attacked):
    def attack(self, batch: Tensor) -> Tensor:
        noise = super().attack(batch)
        self.optimizers().zero_grad()  # type: ignore[union-attr]
        return noise


class ClearedLate(Attacked):
    """After the forward whose loss it returns."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.zero_grad()
        return loss


class Iterated(Attacked):
    """Projected gradient descent: several backwards, the last of them of a graph that began before the others."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        embedded = self.embed(batch[:, :-1])
        noise = torch.zeros_like(embedded)
        for _ in range(3):
            noise = noise.detach().requires_grad_()
            self.of_embedded(embedded.detach() + noise, batch).backward()
            assert noise.grad is not None
            noise = noise + 0.03 * noise.grad.sign()
        return self.of_embedded(embedded + noise.detach(), batch)


class TwiceTheSame(Attacked):
    """Runs the backward of the loss that it returns."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        loss.backward(retain_graph=True)
        return loss


class ForInputsOnly(Attacked):
    def attack(self, batch: Tensor) -> Tensor:
        x = self.embed(batch[:, :-1]).detach().requires_grad_()
        self.of_embedded(x, batch).backward(inputs=[x])
        assert x.grad is not None
        return 0.1 * x.grad.sign()


class SeveralLosses(Attacked):
    """`torch.autograd.backward` of two tensors, one of them not a number."""

    def attack(self, batch: Tensor) -> Tensor:
        x = self.embed(batch[:, :-1]).detach().requires_grad_()
        out = self.layers[0](x)
        torch.autograd.backward([self.of_embedded(x, batch), out], [None, torch.full_like(out, 0.01 / len(out))])
        assert x.grad is not None
        return 0.1 * x.grad.sign()


class Penalized(Attacked):
    """A penalty whose graph was made before a backward that comes between it and the step's."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch[:, :-1]).detach().requires_grad_()
        (grad,) = torch.autograd.grad(self.of_embedded(x, batch) * len(batch), x, create_graph=True)
        noise = self.attack(batch)
        loss = self.of_embedded(self.embed(batch[:, :-1]) + noise, batch)
        return loss + 0.1 * grad.pow(2).sum() / len(batch)


class Watched(Attacked):
    """Keeps the gradients that a backward of its own leaves."""

    def attack(self, batch: Tensor) -> Tensor:
        self.zero_grad()
        noise = super().attack(batch)
        for parameter in self.parameters():
            grad = parameter.grad
            if grad is not None:
                self.found.append(whole_tensor(grad))
        return noise


class InHooks(Attacked):
    """Backwards in the hooks of a batch; those after the step's add to its gradients."""

    def _own(self, batch: Tensor, share: float = 1.0) -> None:
        (share * self.loss(batch)).backward()

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self._own(batch)
        self.batch = batch

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self._own(self.batch)

    def on_after_backward(self) -> None:
        self._own(self.batch, 0.5)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._own(self.batch, 0.25)


class InEvaluation(Attacked):
    """How well it stands an attack, between steps of training."""

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        with torch.enable_grad():
            noise = self.attack(batch)
        self.log("val_loss", self.of_embedded(self.embed(batch[:, :-1]) + noise, batch), sync_dist=True)


class ByHand(Attacked):
    """Steps by hand, with a backward that Lightning does not know of."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        for _ in range(2):
            noise = self.attack(batch)
            optimizer.zero_grad()
            self.of_embedded(self.embed(batch[:, :-1]) + noise, batch).backward()
            optimizer.step()


class ClearedFirst(ByHand):
    """Clears gradients by the module's own method, before anything else in a step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        self.optimizers().step()  # type: ignore[union-attr]


class OwnWeights(Attacked):
    """Has a weight of its own, which no block holds."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.scale = torch.nn.Parameter(torch.ones(8))
        self.factor = torch.nn.Parameter(torch.tensor(1.5))

    def of_embedded(self, x: Tensor, batch: Tensor) -> Tensor:
        return super().of_embedded(x * self.scale * self.factor, batch)


class OwnWeightsCleared(OwnWeights, Cleared):
    pass


class OwnWeightsByHand(OwnWeights, ByHand):
    pass


KINDS: dict[str, type[Attacked]] = {kind.__name__: kind for kind in Attacked.__subclasses__()} | {"Attacked": Attacked}
KINDS |= {kind.__name__: kind for kind in (ClearedFirst, OwnWeightsCleared, OwnWeightsByHand)}


def whole_tensor(tensor: Tensor) -> Tensor:
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator]
    return full.detach().clone()

"""What a run did, by name: losses, gradients, norms and parameters, with those of all stages together."""

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_5d import FiveD
from tests.modules import Tokens
from tests.trainers import quiet


class Record(L.Callback):
    """Keeps, for every optimizer step, the loss, the norm and this rank's gradients; and the parameters of the end."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.parameters: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, FiveD):
            self.norms.append(float(strategy.gradient_norm()))
        else:
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            self.norms.append(float(torch.nn.utils.get_total_norm(grads)))
        named = self.named(module)
        self.gradients.append(self.kept(trainer, {n: p.grad for n, p in named.items() if p.grad is not None}))

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.parameters = self.kept(trainer, dict(self.named(module)))

    def named(self, module: L.LightningModule) -> dict[str, Tensor]:
        """The parameters, a tied one under each of its names."""
        return {name: p for name, p in module.named_parameters(remove_duplicate=False) if p.numel()}

    def kept(self, trainer: L.Trainer, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of what this rank has, whole over the data ranks."""
        return {name: _whole(value) for name, value in values.items()}

    def __call__(self) -> dict[str, Any]:
        return {"losses": self.losses, "norms": self.norms, "gradients": self.gradients, "parameters": self.parameters}


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def rows(count: int, batch_size: int, data_ranks: int = 1, data_rank: int = 0) -> DataLoader[Tensor]:
    """Token rows in order, dealt out to data ranks: together they read what one process reads in bigger batches."""
    data = Tokens(count)
    sampler = DistributedSampler(data, data_ranks, data_rank, shuffle=False)
    return DataLoader(data, batch_size=batch_size // data_ranks, sampler=sampler)


def fit(
    rank: int, module: Any, data: Any, strategy: Any, ranks: int, data_ranks: int = 1, **arguments: Any
) -> dict[str, Any]:
    """Trains inside a rank of a pool; stages are the outer axis."""
    record = Record()
    trainer = quiet(strategy=strategy(), devices=ranks, callbacks=[record], use_distributed_sampler=False, **arguments)
    trainer.fit(module(), data(data_ranks=data_ranks, data_rank=rank % data_ranks))
    return {**record(), "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()}}


def fit_alone(module: Any, data: Any, **arguments: Any) -> dict[str, Any]:
    """The same in one process, without FiveD."""
    record = Record()
    trainer = quiet(devices=1, callbacks=[record], **arguments)
    trainer.fit(module(), data())
    return {**record(), "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()}}


def worst(found: list[dict[str, Any]], expected: dict[str, Any], floor: float = 1e-12) -> dict[str, float]:
    """Largest differences relative to the expected tensor's largest magnitude; ranks together must have everything.

    A tensor whose magnitudes are below `floor` is compared with that: some gradients are zero but for rounding.
    """
    mean = torch.tensor([each["losses"] for each in found]).mean(0)  # of the data ranks, each of which has its own
    differences = {"losses": _each_apart(mean, expected["losses"]), "norms": 0.0, "gradients": 0.0, "parameters": 0.0}
    for each in found:
        differences["norms"] = max(differences["norms"], _each_apart(each["norms"], expected["norms"]))
        for step, gradients in enumerate(each["gradients"]):
            for name, gradient in gradients.items():
                differences["gradients"] = max(
                    differences["gradients"], _apart(gradient, expected["gradients"][step][name], floor)
                )
        for name, value in each["parameters"].items():
            differences["parameters"] = max(
                differences["parameters"], _apart(value, expected["parameters"][name], floor)
            )
    names = set().union(*(each["parameters"] for each in found))
    if names != set(expected["parameters"]):
        raise AssertionError(
            f"missing {set(expected['parameters']) - names}, too many {names - set(expected['parameters'])}"
        )
    for step, gradients in enumerate(expected["gradients"]):
        have = set().union(*(each["gradients"][step] for each in found))
        if have != set(gradients):
            raise AssertionError(f"step {step}: gradients missing for {set(gradients) - have}")
    return differences


def _apart(a: Tensor, b: Tensor, floor: float) -> float:
    if a.shape != b.shape:
        return float("inf")
    return float((a - b).abs().max() / b.abs().max().clamp(min=floor))


def _each_apart(a: Any, b: Any) -> float:
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    return float(((a - b).abs() / b.abs()).max())

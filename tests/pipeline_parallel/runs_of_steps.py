"""Runs that differ in how the Trainer is set up, and what each of them did."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_5d import FiveD
from tests.modules import TinyLM
from tests.pipeline_parallel.recorded import Record
from tests.pipeline_parallel.whole_runs import Model, part, trainer_of
from tests.trainers import plain


class Keeping(TinyLM):
    """Never clears gradients."""

    def optimizer_zero_grad(self, *_: Any) -> None:
        """Leaves them."""


class ClearingLate(TinyLM):
    """Clears gradients by itself, to zeros, and looks at them before."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.before: list[float] = []

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        grads = [p.grad.abs().sum().item() for p in self.parameters() if p.grad is not None]
        self.before.append(sum(grads))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


_plain, _keeping, _clearing = (partial(kind, layers=4, tied=True) for kind in (TinyLM, Keeping, ClearingLate))
_step_wise = partial(Model, step_wise=True, tied=True)

STEPS: dict[str, tuple[Callable[[], L.LightningModule], dict[str, Any]]] = {
    "windows of two": (_plain, {"accumulate_grad_batches": 2}),
    "windows of three": (_plain, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3}),
    "clipping by value": (_plain, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "clipping by norm": (_plain, {"gradient_clip_val": 0.3}),
    "gradients never cleared": (_keeping, {}),
    "gradients never cleared, in windows": (_keeping, {"accumulate_grad_batches": 2}),
    "gradients cleared to zeros": (_clearing, {"accumulate_grad_batches": 2}),
    "rates step by step": (_step_wise, {}),
    "rates in windows": (_step_wise, {"accumulate_grad_batches": 3}),
}
"""How gradients become steps: a module and arguments of the Trainer."""


def steps(rank: int, ranks: int, data_ranks: int = 1, stage: int = 1, schedule: str = "1f1b") -> dict[str, Any]:
    """Trains in each of these ways on five batches, the last of which is smaller; two epochs."""
    found = {}
    for name, (make, arguments) in STEPS.items():
        record, module = Record(), make()
        if ranks == 1 and "accumulate_grad_batches" in arguments:
            arguments = {
                **arguments,
                "strategy": FiveD(),
            }  # it takes a window for what it is, also one that is not full
        trainer = trainer_of(ranks, data_ranks, stage, schedule, callbacks=[record], max_epochs=2, **arguments)
        trainer.fit(module, part(36, 8, 1, rank % data_ranks, data_ranks))
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        before = getattr(module, "before", [])
        found[name] = {**_tied(record()), "steps": trainer.global_step, "rates": rates, "before": before}
    return found


def _tied(record: dict[str, Any]) -> dict[str, Any]:
    """The head's weight by the name that it has in one process, where the embedding's is the same."""

    def named(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"embed.weight" if name == "head.weight" else name: tensor for name, tensor in tensors.items()}

    return {**record, "gradients": [*map(named, record["gradients"])], "parameters": named(record["parameters"])}


class Hooks(L.Callback):
    """Keeps which hooks have run, with the losses of the steps."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(("train", batch_idx, len(batch), float(outputs["loss"])))

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int, *_: Any) -> None:
        self.seen.append(("val", index, float(outputs)))

    def on_test_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int, *_: Any) -> None:
        self.seen.append(("test", index, float(outputs["loss"])))

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.seen.append(("validated", trainer.sanity_checking, trainer.global_step))

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.seen.append(("epoch", plain(trainer.callback_metrics)))


LIMITS: dict[str, dict[str, Any]] = {
    "max_steps": {"max_steps": 3, "max_epochs": -1},
    "val_check_interval": {"val_check_interval": 2},
    "val_check_interval over epochs": {"val_check_interval": 3, "check_val_every_n_epoch": None, "max_epochs": 3},
    "limits": {"limit_train_batches": 2, "limit_val_batches": 1, "limit_test_batches": 1, "num_sanity_val_steps": 2},
    "part of an epoch": {"limit_train_batches": 0.5, "limit_val_batches": 0.0},
    "fast_dev_run": {"fast_dev_run": 2},
    "overfit_batches": {"overfit_batches": 1, "max_epochs": 2},
    "every other epoch": {"check_val_every_n_epoch": 2, "max_epochs": 2},
}
"""Arguments of the Trainer that say how much is run."""


def limits(rank: int, ranks: int) -> dict[str, Any]:
    """Validates, fits, fits again and tests with each of them."""
    found = {}
    for name, arguments in LIMITS.items():
        hooks, module = Hooks(), Model()
        trainer = trainer_of(ranks, callbacks=[hooks], inference_mode=False, **arguments)
        data, val = part(26, 8, 1, 0, 1), part(10, 8, 2, 0, 1)
        shown = [trainer.validate(module, val, verbose=False)]
        trainer.fit(module, data, val)
        if trainer.max_epochs is not None and trainer.max_epochs != -1:
            trainer.fit_loop.max_epochs = trainer.max_epochs + 1
            trainer.fit(module, data, val)
        shown.append(trainer.test(module, val, verbose=False))
        found[name] = hooks.seen, shown, trainer.global_step, trainer.current_epoch, plain(trainer.logged_metrics)
    return found

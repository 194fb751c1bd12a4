"""Many runs in stages against one of one process that accumulates over the same microbatches."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning as L
import torch

from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, Dealt, Rows, WholeRecord, apart
from tests.trainers import quiet

ROWS, BATCH = 32, 16


class BufferRecord(WholeRecord):
    """Keeps buffers, too, those that checkpoints have; as each rank has them."""

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        super().on_train_end(trainer, module)
        kept = set(module.state_dict())
        self.buffers = {name: buffer.clone() for name, buffer in module.named_buffers() if name in kept}


def fit_settings(
    rank: int, module: Callable[[], Any], settings: Mapping[str, Callable[[], Any]], world: int, **arguments: Any
) -> dict[str, Any]:
    """Trains under one strategy after the other."""
    return {name: _fit(module, strategy, BATCH, devices=world, **arguments) for name, strategy in settings.items()}


def _fit(module: Callable[[], Any], strategy: Callable[[], Any] | None, batch: int, **arguments: Any) -> dict[str, Any]:
    record = BufferRecord()
    chosen = {} if strategy is None else {"strategy": strategy()}
    trainer = quiet(callbacks=[record], use_distributed_sampler=False, gradient_clip_val=0.5, **chosen, **arguments)
    trainer.fit(module(), datamodule=Dealt(Rows(ROWS, 6), batch))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {**record(), "buffers": record.buffers, "metrics": metrics}


def compare_settings(
    ranks: RankPool,
    world: int,
    module: Callable[[], Any],
    settings: Mapping[str, Callable[[], Any]],
    microbatches: int,
    tolerance: float = 1e-5,
    **arguments: Any,
) -> None:
    """Trains under each strategy and alone, and compares losses, norms, gradients, weights, buffers and what is logged."""
    call = partial(fit_settings, module=module, settings=settings, world=world, **arguments)
    found = ranks(world, call, **SEPARATE)
    alone = {"devices": 1, "accumulate_grad_batches": microbatches}
    expected = _fit(module, None, BATCH // microbatches, **{**arguments, **alone})
    expected["losses"] = torch.tensor(expected["losses"]).view(-1, microbatches).sum(1).tolist()
    worst: dict[str, dict[str, float]] = {}
    for name in settings:
        mine = [each[name] for each in found]
        worst[name] = apart(mine, expected, 1e-6)
        worst[name]["buffers"] = max(
            float((value - expected["buffers"][key]).abs().max())
            for each in mine
            for key, value in each["buffers"].items()
        )
        worst[name]["metrics"] = max(
            abs(each["metrics"][key] / value - 1) for each in mine for key, value in expected["metrics"].items()
        )
    bad = {name: found for name, found in worst.items() if max(found.values()) >= tolerance}
    assert not bad, bad

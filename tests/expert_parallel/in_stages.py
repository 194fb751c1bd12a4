"""Many runs in stages against one of one process that accumulates over the same microbatches."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning as L
import torch

from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, Dealt, Rows, WholeRecord, apart, decoder
from tests.trainers import quiet

ROWS, BATCH = 32, 16
EXPERTS = {"experts": 4, "top_k": 2, "intermediate_size": 12, "shared": 1, "balance": 0.3, "z": 0.2, "bias_rate": 0.05}


def sparse(**changes: Any) -> Callable[[], Any]:
    """The reference model with experts in all of its blocks but the first, with losses of all kinds and a bias."""
    return decoder(num_layers=4, dense_layers=1, moe={**EXPERTS, **changes})


class BufferRecord(WholeRecord):
    """Keeps buffers, too, those that checkpoints have; as each rank has them."""

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        super().on_train_end(trainer, module)
        kept = set(module.state_dict())
        self.buffers = {name: buffer.clone() for name, buffer in module.named_buffers() if name in kept}


def fit_settings(
    rank: int,
    module: Callable[[], Any],
    settings: Mapping[str, Callable[[], Any]],
    data: Callable[[], Any],
    world: int,
    **arguments: Any,
) -> dict[str, Any]:
    """Trains under one strategy after the other."""
    return {name: _fit(module, strategy, data, devices=world, **arguments) for name, strategy in settings.items()}


def _fit(
    module: Callable[[], Any], strategy: Callable[[], Any] | None, data: Callable[[], Any], **arguments: Any
) -> dict[str, Any]:
    record = BufferRecord()
    chosen = {} if strategy is None else {"strategy": strategy()}
    # One batch is validated, in which everything runs that evaluation has of its own; its numbers are not compared.
    common: dict[str, Any] = {"use_distributed_sampler": False, "gradient_clip_val": 0.5, "limit_val_batches": 1}
    trainer = quiet(callbacks=[record], **common, **chosen, **arguments)
    trainer.fit(module(), datamodule=data())
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {**record(), "buffers": record.buffers, "metrics": metrics}


def compare_settings(
    ranks: RankPool,
    world: int,
    module: Callable[[], Any],
    settings: Mapping[str, Callable[[], Any]],
    microbatches: int,
    data: Callable[[], Any] | None = None,
    tolerance: float = 1e-5,
) -> None:
    """Trains under each strategy and alone, and compares losses, norms, gradients, weights and buffers.

    Args:
        ranks: The pool.
        world: How many of it.
        module: Makes the module.
        settings: Makes the strategy of each run, by name.
        microbatches: Batches that one process accumulates over.
        data: Makes the data.
        tolerance: What differences have to be below.
    """
    call = partial(fit_settings, module=module, settings=settings, data=data or partial(_rows, BATCH), world=world)
    found = ranks(world, call, **SEPARATE)
    alone = data or partial(_rows, BATCH // microbatches)
    expected = _fit(module, None, alone, devices=1, accumulate_grad_batches=microbatches)
    expected["losses"] = torch.tensor(expected["losses"]).view(-1, microbatches).sum(1).tolist()
    worst = {name: _apart([each[name] for each in found], expected) for name in settings}
    bad = {name: found for name, found in worst.items() if max(found.values()) >= tolerance}
    assert not bad, bad


def _rows(batch: int) -> Dealt:
    return Dealt(Rows(ROWS, 6), batch)


def _apart(found: list[dict[str, Any]], expected: dict[str, Any]) -> dict[str, float]:
    differences = apart(found, expected, 1e-6)
    buffers = [(each["buffers"][name], expected["buffers"][name]) for each in found for name in each["buffers"]]
    differences["buffers"] = max((float((one - other).abs().max()) for one, other in buffers), default=0.0)
    assert set().union(*(each["buffers"] for each in found)) == set(expected["buffers"])
    return differences

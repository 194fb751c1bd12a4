"""Half precisions with experts on other ranks: as exact as in one process, and a step is left out by all ranks or by none."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch.distributed.tensor import DTensor

from lightning_5d import ExpertParallel, FiveD, FiveDPrecision, LossScaling, Parallelism, TensorParallel, ZeRO
from tests.expert_parallel.test_training import mixture
from tests.ranks.pool import RankPool
from tests.tensor_parallel.halves import HALVES, error
from tests.tensor_parallel.parity import SEPARATE, Dealt, Rows, fit
from tests.trainers import quiet


def _deal() -> Dealt:
    return Dealt(Rows(4, 6), 4)


def _gradients(rank: int, plugins: Sequence[Parallelism], devices: int, precisions: Sequence[str]) -> list[Any]:
    """What the first backward gives in each precision."""
    found = []
    for precision in precisions:
        plugin = FiveDPrecision(precision, loss_scaling=LossScaling(256.0) if precision == "16-mixed" else None)
        strategy = partial(FiveD, *plugins)
        run = fit(rank, mixture(shared=1), _deal, strategy, devices=devices, plugins=plugin, limit_val_batches=0)
        found.append({name: value.double() for name, value in run["gradients"][0].items()} if rank == 0 else None)
    return found


@pytest.fixture(scope="module")
def alone(rank_pool: RankPool) -> list[Any]:
    """One rank, in double and in half precision."""
    call = partial(_gradients, plugins=(), devices=1, precisions=["64-true", *HALVES])
    found: list[Any] = rank_pool(1, call, **SEPARATE)[0]
    return found


@pytest.mark.parametrize(
    "plugins",
    [
        (ExpertParallel(2),),
        (ExpertParallel(2), ZeRO(stage=3)),
        (ExpertParallel(4), TensorParallel(2, sequence_parallel=True)),
        (ExpertParallel(2, tensor=2), TensorParallel(2)),
    ],
    ids=["ep2", "ep2+zero3", "ep4+tp2+sp", "etp"],
)
def test_half_precision_is_as_exact_as_in_one_process(
    ranks: RankPool, alone: list[Any], plugins: tuple[Parallelism, ...]
) -> None:
    devices = 2 if len(plugins) == 1 else 4
    call = partial(_gradients, plugins=plugins, devices=devices, precisions=HALVES)
    exact, *halves = alone
    for precision, one, spread in zip(HALVES, halves, ranks(devices, call, **SEPARATE)[0], strict=True):
        assert set(spread) == set(exact)
        # Sums over ranks are rounded once more than those of one process.
        assert 0 < error(spread, exact) < 1.5 * error(one, exact), precision


class Overflow(L.Callback):
    """Makes one gradient of an expert infinite on one rank, in the second step."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.biases: list[float] = []

    def on_after_backward(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_step == 1 and not self.scales[1:] and trainer.global_rank == 1:
            grad: Any = module.get_parameter("decoder.layers.0.mlp.experts.down_proj").grad
            (grad.to_local() if isinstance(grad, DTensor) else grad)[:1].fill_(torch.inf)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        self.scales.append(trainer.precision_plugin.scaler.scale)  # type: ignore[union-attr]
        self.biases.append(float(module.decoder.layers[0].mlp.gate.expert_bias.abs().sum()))


def _overflow(rank: int) -> dict[str, Any]:
    seen, strategy = Overflow(), FiveD(ExpertParallel(2))
    plugin = FiveDPrecision("16-mixed", loss_scaling=LossScaling(init_scale=1024.0))
    trainer = quiet(strategy=strategy, devices=2, plugins=plugin, callbacks=[seen], use_distributed_sampler=False)
    trainer.fit(mixture(bias_rate=0.1)(), datamodule=Dealt(Rows(16, 6), 4))
    weights = strategy.full_state_dict().values()
    finite = all(bool(value.isfinite().all()) for value in weights if not value.is_meta)
    return {
        "scales": seen.scales,
        "biases": seen.biases,
        "skipped": strategy.skipped_steps.total,
        "finite": finite,
    }


def test_an_expert_that_overflows_on_one_rank_is_left_out_by_all(ranks: RankPool) -> None:
    found = ranks(2, _overflow, **SEPARATE)
    assert found[0] == found[1]
    assert found[0]["scales"] == [1024.0, 512.0, 512.0, 512.0]
    assert found[0]["biases"][0] == found[0]["biases"][1] > 0  # nor does the routers' bias move
    assert found[0]["skipped"] == 1
    assert found[0]["finite"]

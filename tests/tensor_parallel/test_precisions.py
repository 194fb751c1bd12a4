"""Precisions under the tensor axis: as in one process of the same precision, within what the dtype allows."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_5d import FiveD, FiveDPrecision, LossScaling, Parallelism, TensorParallel, ZeRO
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, Dealt, Rows, compare, decoder, fit
from tests.trainers import quiet

SEQUENCE = pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp+sp"])
HALVES = ["bf16-mixed", "16-mixed", "bf16-true", "16-true"]


@SEQUENCE
def test_a_run_in_double_precision_is_that_of_one_process(ranks: RankPool, sequence: bool) -> None:
    tensor = TensorParallel(2, sequence_parallel=sequence)
    compare(ranks, decoder(), tensor, ZeRO(stage=1), world=4, precision="64-true", tolerance=1e-10)


def _deal() -> Dealt:
    return Dealt(Rows(4, 6), 4)


def _gradients(rank: int, plugins: Sequence[Parallelism], devices: int, precisions: Sequence[str]) -> list[Any]:
    """What the first backward gives in each precision."""
    found = []
    for precision in precisions:
        plugin = FiveDPrecision(precision, loss_scaling=LossScaling(256.0) if precision == "16-mixed" else None)
        run = fit(rank, decoder(), _deal, partial(FiveD, *plugins), devices=devices, plugins=plugin)
        found.append({name: value.double() for name, value in run["gradients"][0].items()} if rank == 0 else None)
    return found


def _error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    together = [torch.cat([each[name].flatten() for name in exact]) for each in (found, exact)]
    return float((together[0] - together[1]).norm() / together[1].norm())


@pytest.fixture(scope="module")
def alone(rank_pool: RankPool) -> list[Any]:
    """One rank, in double and in half precision."""
    found: list[Any] = rank_pool(
        1, partial(_gradients, plugins=(), devices=1, precisions=["64-true", *HALVES]), **SEPARATE
    )[0]
    return found


@SEQUENCE
def test_half_precision_is_as_exact_as_in_one_process(ranks: RankPool, alone: list[Any], sequence: bool) -> None:
    call = partial(_gradients, plugins=[TensorParallel(2, sequence_parallel=sequence)], devices=2, precisions=HALVES)
    exact, *halves = alone
    for precision, one, cut in zip(HALVES, halves, ranks(2, call, **SEPARATE)[0], strict=True):
        assert set(cut) == set(exact)
        # Sums over two ranks are rounded once more than those of one process.
        assert 0 < _error(cut, exact) < 1.5 * _error(one, exact), precision


class Overflow(L.Callback):
    """Makes one gradient infinite on one rank of the tensor axis, in the second step."""

    def __init__(self) -> None:
        self.scales: list[float] = []

    def on_after_backward(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_step == 1 and not self.scales[1:]:
            grad: Any = module.get_parameter("decoder.layers.0.mlp.up_proj.weight").grad
            if trainer.global_rank == 1:
                grad.to_local().fill_(torch.inf)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.scales.append(trainer.precision_plugin.scaler.scale)  # type: ignore[union-attr]


def _overflow(rank: int, sequence: bool) -> dict[str, Any]:
    seen = Overflow()
    plugin = FiveDPrecision("16-mixed", loss_scaling=LossScaling(init_scale=1024.0))
    strategy = FiveD(TensorParallel(2, sequence_parallel=sequence))
    trainer = quiet(strategy=strategy, devices=2, plugins=plugin, callbacks=[seen], use_distributed_sampler=False)
    trainer.fit(decoder()(), datamodule=Dealt(Rows(16, 6), 4))
    parameters = strategy.full_state_dict()
    finite = all(bool(value.isfinite().all()) for value in parameters.values() if not value.is_meta)
    return {"scales": seen.scales, "skipped": strategy.skipped_steps.total, "finite": finite}


@SEQUENCE
def test_an_overflow_on_one_rank_is_left_out_by_all(ranks: RankPool, sequence: bool) -> None:
    found = ranks(2, partial(_overflow, sequence=sequence), **SEPARATE)
    assert found[0] == found[1]
    assert found[0]["scales"] == [1024.0, 512.0, 512.0, 512.0]
    assert found[0]["skipped"] == 1
    assert found[0]["finite"]

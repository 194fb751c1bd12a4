"""A Trainer that is gone, and what it held."""

import gc
import os
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch.distributed.tensor import DTensor, Replicate
from typing_extensions import override

from lightning_5d import ContextParallel, ExpertParallel, FiveD, PipelineParallel, TensorParallel, ZeRO
from lightning_5d.communication import destroy_process_groups
from lightning_5d.models import DecoderConfig, LanguageModel
from tests.expert_parallel.test_training import mixture
from tests.ranks.pool import RankPool
from tests.ranks.state import event_loops
from tests.tensor_parallel.parity import SIZES, Dealt, Rows, decoder
from tests.trainers import quiet

LAYOUTS: dict[str, tuple[Any, ...]] = {
    "stage 0": (ZeRO(stage=0),),
    "stage 3": (ZeRO(stage=3),),
    "tensor": (ZeRO(stage=1), TensorParallel(2)),
    "pipeline": (PipelineParallel(2, microbatches=2),),
    "context": (ContextParallel(2),),
    "expert": (ExpertParallel(2), ZeRO(stage=1)),
}
Run = Callable[[L.Trainer, L.LightningModule], None]


class _Redistributing(L.Callback):
    """Brings whole weights together between batches: torch remembers how, and with it the mesh that they are spread over."""

    def __init__(self) -> None:
        self.seen = 0

    @override
    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        for parameter in module.parameters():
            if isinstance(parameter, DTensor):
                parameter.redistribute(placements=[Replicate()] * parameter.device_mesh.ndim)
                self.seen += 1


class _Raising(L.Callback):
    def __init__(self, error: BaseException) -> None:
        self._error: BaseException | None = error

    @override
    def on_before_zero_grad(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step and (error := self._error) is not None:
            self._error = None  # it has a traceback, and so all frames that it came through
            raise error


class _ByHand(LanguageModel):
    def __init__(self) -> None:
        super().__init__(DecoderConfig(**SIZES), {"lr": 3e-3, "warmup_steps": 2})
        self.automatic_optimization = False

    @override
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def _fit(trainer: L.Trainer, module: L.LightningModule) -> None:
    trainer.fit(module, Dealt(Rows(8, 6), 4))


def _validate(trainer: L.Trainer, module: L.LightningModule) -> None:
    trainer.validate(module, Dealt(Rows(8, 6), 4), verbose=False)


def _use(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Two fits in a row, and what people do after them."""
    _fit(trainer, module)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit_loop.max_epochs = 2
    _fit(trainer, module)
    assert trainer.global_step == 4
    _validate(trainer, module)
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_checkpoint(Path(folder) / "all.ckpt")
    assert isinstance(trainer.strategy, FiveD)
    trainer.strategy.full_state_dict()
    module.state_dict()


def _redistribute(trainer: L.Trainer, module: L.LightningModule) -> None:
    callback = _Redistributing()
    trainer.callbacks.append(callback)  # type: ignore[attr-defined]
    _fit(trainer, module)
    assert callback.seen


def _fail(trainer: L.Trainer, module: L.LightningModule) -> None:
    trainer.callbacks.append(_Raising(ValueError("as told")))  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="as told"):
        _fit(trainer, module)


def _interrupt(trainer: L.Trainer, module: L.LightningModule) -> None:
    trainer.callbacks.append(_Raising(KeyboardInterrupt()))  # type: ignore[attr-defined]
    with pytest.raises(SystemExit):
        _fit(trainer, module)


def _left(rank: int, name: str, run: Run, make: Callable[[], L.LightningModule]) -> list[str]:
    module = make()
    trainer = quiet(strategy=FiveD(*LAYOUTS[name]), devices=2, max_steps=2)
    run(trainer, module)
    references = {
        "the Trainer": weakref.ref(trainer),
        "the strategy": weakref.ref(trainer.strategy),
        "the module": weakref.ref(module),
        **{f"the parameter {name}": weakref.ref(parameter) for name, parameter in module.named_parameters()},
        **{f"{type(optimizer).__name__}": weakref.ref(optimizer) for optimizer in trainer.optimizers},
    }
    assert event_loops() > 0
    destroy_process_groups()
    del module, trainer
    limit = time.monotonic() + 30
    while (left := _living(references)) and time.monotonic() < limit:
        gc.collect()
    return left


def _living(references: dict[str, Any]) -> list[str]:
    groups = event_loops()
    return [f"{groups} groups"] * (groups > 0) + [
        key for key, reference in references.items() if reference() is not None
    ]


def _check(ranks: RankPool, name: str, run: Run, make: Callable[[], L.LightningModule] | None = None) -> None:
    made = make or (mixture() if name == "expert" else decoder())
    assert ranks(2, _left, name, run, made, backend=None, timeout=90.0) == [[], []]


pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/task"), reason="needs the list of threads that Linux has"
)


@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_keeps_a_trainer_that_is_gone_nor_its_process_groups(ranks: RankPool, name: str) -> None:
    _check(ranks, name, _use)


def test_what_torch_remembers_of_redistributed_weights_goes_with_the_groups(ranks: RankPool) -> None:
    _check(ranks, "tensor", _redistribute)


@pytest.mark.parametrize("name", ["stage 3", "pipeline"])
def test_nothing_keeps_a_trainer_whose_step_has_raised(ranks: RankPool, name: str) -> None:
    _check(ranks, name, _fail)


@pytest.mark.parametrize(
    ("name", "run", "make"),
    [
        ("tensor", _interrupt, None),
        ("stage 3", _validate, None),
        ("tensor", _fit, _ByHand),
    ],
    ids=["interrupted", "validated alone", "optimized by hand"],
)
def test_nothing_keeps_a_trainer_however_it_was_used(
    ranks: RankPool, name: str, run: Run, make: Callable[[], L.LightningModule] | None
) -> None:
    _check(ranks, name, run, make)

"""Whatever ranks hold which experts: files are those of one process, and so are initial values and what a module answers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_5d import ContextParallel, ExpertParallel, FiveD, Parallelism, PipelineParallel, TensorParallel, ZeRO
from lightning_5d.expert_parallel.bias import balance_by_bias
from lightning_5d.models import LanguageModel
from lightning_5d.verify import verify
from tests.checkpoint.same import assert_same
from tests.context_parallel.test_checkpoints import Losses
from tests.expert_parallel.adapted import Spreading, rows, sentences
from tests.expert_parallel.routed import Experts, Routed, Router
from tests.expert_parallel.test_training import mixture
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, Dealt, Rows
from tests.trainers import quiet

LAYOUTS: dict[int, tuple[Parallelism, ...]] = {
    # Three experts on each of two ranks, over two ranks with the same ones: none of them has as many as the other.
    3: (ExpertParallel(2), ZeRO(stage=3)),
    5: (),
    6: (ExpertParallel(2, tensor=2), TensorParallel(2), ZeRO(stage=1)),
    7: (ExpertParallel(2), PipelineParallel(2, microbatches=2), ZeRO(stage=1)),
    9: (ExpertParallel(2), ZeRO(stage=0, replicate=2)),
    10: (ExpertParallel(2), ContextParallel(2), ZeRO(stage=2)),
}
"""The steps after which a layout ends; an epoch has four."""


class Steady(LanguageModel):
    """With a rate that does not depend on how long a run will be."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-4)
        balance_by_bias(self, optimizer)
        return optimizer


def steady() -> Steady:
    torch.manual_seed(0)
    return Steady(decoder=mixture(experts=6, balance=0.0, bias_rate=0.01, shared=1)().hparams["decoder"])


KINDS: dict[str, Any] = {
    "own": (steady, rows),
    "Mixtral": (partial(Spreading, "Mixtral"), partial(sentences, 16)),
}


def _steps(rank: int, folder: Path, steps: int, strategy: Any, devices: int) -> list[list[float]]:
    """Each kind up to so many steps, from where the last run ended."""
    found = []
    for kind, (module, data) in KINDS.items():
        losses, path = Losses(), folder / f"{kind}.ckpt"
        chosen = {} if strategy is None else {"strategy": strategy()}
        settings: dict[str, Any] = {"max_epochs": -1, "max_steps": steps, "callbacks": [losses], "devices": devices}
        trainer = quiet(use_distributed_sampler=False, **settings, **chosen)
        trainer.fit(module(), datamodule=data(), ckpt_path=path if path.exists() else None)
        trainer.save_checkpoint(path)
        found.append(losses.found)
    return found


@pytest.mark.timeout(400)
def test_a_run_changes_its_layout_in_the_middle_of_epochs(ranks: RankPool, tmp_path: Path) -> None:
    folder, alone = tmp_path / "changing", tmp_path / "alone"
    found: list[list[float]] = [[], []]
    for steps, plugins in LAYOUTS.items():
        devices = 4 if plugins else 1
        call = partial(_steps, folder=folder, steps=steps, strategy=partial(FiveD, *plugins), devices=devices)
        losses = ranks(4, call, **SEPARATE)[0] if plugins else call(0)
        found = [before + more for before, more in zip(found, losses, strict=True)]
    expected = _steps(0, alone, max(LAYOUTS), None, 1)
    for kind, mine, theirs in zip(KINDS, found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5), kind
        read, wanted = (torch.load(each / f"{kind}.ckpt", weights_only=True) for each in (folder, alone))
        assert_same(read, wanted, atol=1e-5)
    loaded = Steady.load_from_checkpoint(folder / "own.ckpt", weights_only=True)
    bias = loaded.decoder.layers[0].mlp.gate.expert_bias
    assert bias.abs().max() > 0.01
    assert bias.equal(read_bias(alone))


def read_bias(folder: Path) -> torch.Tensor:
    state = torch.load(folder / "own.ckpt", weights_only=True)["state_dict"]
    bias: torch.Tensor = state["decoder.layers.0.mlp.gate.expert_bias"]
    return bias


class Drawn(Experts):
    """With a forward of its own, and values that it draws itself."""

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.3)


class DrawnRouter(Router):
    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.weight)
        self.e_score_correction_bias.zero_()


def _drawn() -> Routed:
    module = Routed((4, 6), lr=0.0)
    for layer in module.layers:
        layer.gate.__class__, layer.experts.__class__ = DrawnRouter, Drawn
    module.loss = lambda batch: Routed.loss(module, batch["input_ids"])  # type: ignore[method-assign]
    return module


EMPTY: dict[str, Callable[[], L.LightningModule]] = {"own": mixture(experts=6, balance=0.0), "others": _drawn}
PLACES: list[tuple[str, tuple[Parallelism, ...]]] = [
    ("own", (ExpertParallel(2), ZeRO(stage=3))),
    ("own", (ExpertParallel(2, tensor=2), TensorParallel(2))),
    ("others", (ExpertParallel(2), ZeRO(stage=1))),
]


def _from_meta(rank: int, places: list[tuple[str, tuple[Parallelism, ...]]], devices: int) -> list[dict[str, Tensor]]:
    found = []
    for kind, plugins in places:
        torch.manual_seed(1000 + rank)
        trainer = quiet(
            strategy=FiveD(*plugins), devices=devices, max_steps=1, limit_val_batches=0, use_distributed_sampler=False
        )
        with trainer.init_module(empty_init=True):
            module = EMPTY[kind]()
        if isinstance(module, LanguageModel):
            module.optimizer_config = type(module.optimizer_config)(lr=0.0)
        assert all(parameter.is_meta for parameter in module.parameters())
        trainer.fit(module, datamodule=Dealt(Rows(8, 6), 8))
        found.append(trainer.strategy.by_parameter(dict(module.named_parameters())))  # type: ignore[attr-defined]
    return found


def test_experts_on_the_meta_device_get_the_values_of_one_process(ranks: RankPool) -> None:
    arguments = {**SEPARATE, "env": {"PL_GLOBAL_SEED": "7"}}
    (alone,) = ranks(1, _from_meta, [(kind, ()) for kind in EMPTY], 1, **arguments)
    expected = dict(zip(EMPTY, alone, strict=True))
    found = ranks(4, _from_meta, PLACES, 4, **arguments)[0]
    for (kind, plugins), values in zip(PLACES, found, strict=True):
        assert list(values) == list(expected[kind])
        for name, value in expected[kind].items():
            assert torch.equal(values[name], value), (plugins, name)


class _Asking(L.Callback):
    """Asks the module on one rank alone, while others have their parameters whole."""

    def __init__(self) -> None:
        self.answer: Tensor | None = None

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        with strategy.unsharded(), torch.no_grad():
            assert not any(isinstance(parameter, DTensor) for parameter in module.parameters())
            if trainer.is_global_zero:
                self.answer = module(torch.arange(10).view(2, 5)).logits


def _asked(rank: int) -> Tensor | None:
    asking = _Asking()
    strategy = FiveD(ExpertParallel(2), ZeRO(stage=3))
    trainer = quiet(strategy=strategy, devices=4, max_steps=1, callbacks=[asking], use_distributed_sampler=False)
    trainer.fit(mixture()(), datamodule=Dealt(Rows(8, 6), 8))
    return asking.answer


def test_inside_unsharded_one_rank_may_ask_the_module_alone(ranks: RankPool) -> None:
    expected = mixture()()(torch.arange(10).view(2, 5)).logits.detach()
    answer, *_ = ranks(4, _asked, **SEPARATE)
    torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-6)


def _verified(rank: int) -> tuple[bool, str]:
    rows = Rows(32, 6)
    batches = [torch.utils.data.default_collate([rows[i], rows[i + 1]]) for i in range(0, 32, 2)]
    strategy = FiveD(ExpertParallel(2, tensor=2), TensorParallel(2), ZeRO(stage=1))
    found = verify(mixture(experts=6, balance=0.0)(), batches, strategy, devices=4, accumulate_grad_batches=2)
    return found.passed, str(found)


def test_verify_compares_gradients_of_experts_whole(ranks: RankPool) -> None:
    for passed, said in ranks(4, _verified, **SEPARATE):
        assert passed, said

"""Whatever ranks hold which experts: the files are those of one process, and so are initial values and what a module answers."""

from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_5d import ExpertParallel, FiveD, PipelineParallel, TensorParallel, ZeRO
from lightning_5d.verify import verify
from tests.checkpoint.same import assert_same
from tests.expert_parallel.test_training import mixture
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, Dealt, Rows
from tests.trainers import quiet


class Layout(NamedTuple):
    """Sizes of the axes and the ZeRO stage; `parts` ranks cut each expert."""

    data: int
    ep: int
    stage: int
    replicate: int = 1
    tp: int = 1
    parts: int = 1
    pp: int = 1

    @property
    def world(self) -> int:
        return self.data * self.tp * self.pp


ALONE = Layout(1, 1, 0)


def _trainer(layout: Layout, **arguments: Any) -> L.Trainer:
    if layout == ALONE:
        return quiet(devices=1, **arguments)
    plugins: list[Any] = [ExpertParallel(layout.ep, tensor=layout.parts)] if layout.ep * layout.parts > 1 else []
    plugins += [TensorParallel(layout.tp)] if layout.tp > 1 else []
    plugins += [PipelineParallel(layout.pp, microbatches=2)] if layout.pp > 1 else []
    strategy = FiveD(*plugins, ZeRO(stage=layout.stage, replicate=layout.replicate))
    return quiet(strategy=strategy, devices=layout.world, use_distributed_sampler=False, **arguments)


def _train(rank: int, layout: Layout, path: str, epochs: int, resume: str | None) -> None:
    trainer = _trainer(layout, max_epochs=epochs)
    module = _made() if resume is None else _other()
    trainer.fit(module, datamodule=Dealt(Rows(16, 6), 8), ckpt_path=resume)
    trainer.save_checkpoint(path)


def _made() -> L.LightningModule:
    # The shares of a balance loss are those of the microbatches so far, in one process those of all.
    return mixture(experts=6, balance=0.0)()


def _other() -> L.LightningModule:
    module = _made()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    return module


def _saved(ranks: RankPool, path: Path, layout: Layout, epochs: int = 1, resume: Path | None = None) -> Any:
    options = {**SEPARATE, **({"env": {"WORLD_SIZE": None}} if layout == ALONE else {})}
    ranks(layout.world, _train, layout, str(path), epochs, None if resume is None else str(resume), **options)
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def one(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """One process: its checkpoint after one epoch, read, and that after a second."""
    folder = tmp_path_factory.mktemp("one")
    first = _saved(rank_pool, folder / "first.ckpt", ALONE)
    return folder / "first.ckpt", first, _saved(rank_pool, folder / "second.ckpt", ALONE, 2, folder / "first.ckpt")


LAYOUTS = {
    # Three experts on each of two ranks, on two ranks for each: none of them has as many as the other.
    "ep2-zero3-to-whole-experts": (Layout(4, 2, 3), Layout(4, 1, 1)),
    "cut-experts-to-replicas": (Layout(2, 2, 1, tp=2, parts=2), Layout(4, 2, 0, replicate=2)),
    "stages-to-tensor-ranks": (Layout(2, 2, 1, pp=2), Layout(2, 2, 2, tp=2)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_goes_from_any_layout_to_any(
    ranks: RankPool, tmp_path: Path, one: tuple[Path, Any, Any], name: str
) -> None:
    path, first, second = one
    writer, reader = LAYOUTS[name]
    assert_same(_saved(ranks, tmp_path / "first.ckpt", writer), first)
    assert_same(_saved(ranks, tmp_path / "second.ckpt", reader, 2, tmp_path / "first.ckpt"), second)
    if writer.parts > 1:
        assert_same(_saved(ranks, tmp_path / "from-one.ckpt", writer, 2, path), second)


def _from_meta(rank: int, layout: Layout) -> dict[str, Tensor]:
    torch.manual_seed(1000 + rank)
    trainer = quiet(strategy=FiveD(), devices=1, max_steps=1) if layout == ALONE else _trainer(layout, max_steps=1)
    with trainer.init_module(empty_init=True):
        module = _made()
    module.optimizer_config = type(module.optimizer_config)(lr=0.0)
    assert all(parameter.is_meta for parameter in module.parameters())
    trainer.fit(module, datamodule=Dealt(Rows(8, 6), 8))
    return trainer.strategy.by_parameter(dict(module.named_parameters()))  # type: ignore[attr-defined]


def test_experts_on_the_meta_device_get_the_values_of_one_process(ranks: RankPool) -> None:
    arguments = {**SEPARATE, "env": {"PL_GLOBAL_SEED": "7"}}
    (expected,) = ranks(1, _from_meta, ALONE, **arguments)
    for layout in (Layout(4, 2, 3), Layout(2, 2, 0, tp=2, parts=2)):
        found = ranks(4, _from_meta, layout, **arguments)[0]
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


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


def _asked(rank: int, layout: Layout) -> Tensor | None:
    asking = _Asking()
    trainer = _trainer(layout, max_steps=1, callbacks=[asking])
    trainer.fit(mixture()(), datamodule=Dealt(Rows(8, 6), 8))
    return asking.answer


@pytest.mark.parametrize("stage", [0, 3])
def test_inside_unsharded_one_rank_may_ask_the_module_alone(ranks: RankPool, stage: int) -> None:
    expected = mixture()()(torch.arange(10).view(2, 5)).logits.detach()
    answer, *_ = ranks(4, _asked, Layout(4, 2, stage), **SEPARATE)
    torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-6)


def _verified(rank: int) -> tuple[bool, str]:
    rows = Rows(32, 6)
    batches = [torch.utils.data.default_collate([rows[i], rows[i + 1]]) for i in range(0, 32, 2)]
    strategy = FiveD(ExpertParallel(2, tensor=2), TensorParallel(2), ZeRO(stage=1))
    found = verify(_made(), batches, strategy, devices=4, accumulate_grad_batches=2)
    return found.passed, str(found)


def test_verify_compares_gradients_of_experts_whole(ranks: RankPool) -> None:
    for passed, said in ranks(4, _verified, **SEPARATE):
        assert passed, said

"""The files of a run over the tensor axis are those of one process, whatever the layout that wrote or reads them."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_5d import FiveD, PipelineParallel, ZeRO
from tests.checkpoint.same import assert_same
from tests.modules import VOCABULARY
from tests.pipeline_parallel.recorded import rows
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parted import Parted, Parts
from tests.trainers import quiet

TRAINER: dict[str, Any] = {"backend": None, "timeout": 60}
ALONE: dict[str, Any] = {"backend": None, "timeout": 60, "env": {"WORLD_SIZE": None}}

Layout = tuple[int, int, int, int]
"""Sizes of pp, dp and tp, and the ZeRO stage."""

ONE: Layout = (1, 1, 1, 0)


def _trainer(layout: Layout, **arguments: Any) -> L.Trainer:
    pp, dp, tp, stage = layout
    if layout == ONE:
        return quiet(devices=1, **arguments)
    plugins = [*([PipelineParallel(pp, microbatches=2)] if pp > 1 else []), *([Parts(tp)] if tp > 1 else [])]
    strategy = FiveD(*plugins, ZeRO(stage=stage))
    return quiet(strategy=strategy, devices=pp * dp * tp, use_distributed_sampler=False, **arguments)


def _train(rank: int, layout: Layout, path: str, epochs: int, resume: str | None, frozen: tuple[str, ...]) -> None:
    trainer = _trainer(layout, max_epochs=epochs)
    _, dp, tp, _ = layout
    module = Parted(layers=4, seed=5 if resume else 0, frozen=frozen)
    trainer.fit(module, rows(8, 4, dp, rank // tp % dp), ckpt_path=resume)
    trainer.save_checkpoint(path)


def _saved(
    ranks: RankPool, path: Path, layout: Layout, epochs: int = 1, resume: Path | None = None, frozen: Any = ()
) -> Any:
    pp, dp, tp, _ = layout
    options = ALONE if layout == ONE else TRAINER
    ranks(pp * dp * tp, _train, layout, str(path), epochs, None if resume is None else str(resume), frozen, **options)
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def one(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """One process: its checkpoint after one epoch, read, and that after a second."""
    folder = tmp_path_factory.mktemp("one")
    first = _saved(rank_pool, folder / "first.ckpt", ONE)
    return folder / "first.ckpt", first, _saved(rank_pool, folder / "second.ckpt", ONE, 2, folder / "first.ckpt")


LAYOUTS: dict[str, tuple[Layout, Layout]] = {
    "tp2xpp2-to-dp4": ((2, 1, 2, 1), (1, 4, 1, 1)),
    "tp4-to-pp4": ((1, 1, 4, 0), (4, 1, 1, 0)),
    "dp2xtp2-to-one": ((1, 2, 2, 3), ONE),
    "dp4-to-tp2xpp2xdp2": ((1, 4, 1, 2), (2, 2, 2, 3)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_goes_from_any_layout_to_any(
    ranks: RankPool, tmp_path: Path, one: tuple[Path, Any, Any], name: str
) -> None:
    path, first, second = one
    writer, reader = LAYOUTS[name]
    assert_same(_saved(ranks, tmp_path / "first.ckpt", writer), first)
    assert_same(_saved(ranks, tmp_path / "second.ckpt", reader, 2, tmp_path / "first.ckpt"), second)
    if reader != ONE:
        assert_same(_saved(ranks, tmp_path / "from-one.ckpt", reader, 2, path), second)


def test_frozen_weights_are_saved_and_need_no_optimizer_state(ranks: RankPool, tmp_path: Path) -> None:
    frozen = ("embed", "q.", "v.", "norm")
    alone = _saved(ranks, tmp_path / "one.ckpt", ONE, frozen=frozen)
    found = _saved(ranks, tmp_path / "four.ckpt", (1, 1, 4, 0), frozen=frozen)
    assert_same(found, alone)
    again = _saved(ranks, tmp_path / "again.ckpt", (2, 1, 2, 1), 2, tmp_path / "four.ckpt", frozen)
    for name, value in alone["state_dict"].items():
        if any(part in name for part in frozen) or name == "head.weight":
            assert torch.equal(again["state_dict"][name], value), name
        else:
            assert not torch.equal(again["state_dict"][name], value), name


def _loads(rank: int, path: str) -> None:
    trainer = _trainer((1, 1, 2, 1))
    trainer.validate(Parted(layers=4), rows(8, 4), ckpt_path=path, verbose=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("layers.0.mixer.down.weight"), r"Missing key.*layers\.0\.mixer\.down\.weight"),
        (lambda state: state.update(extra=torch.ones(2)), r"Unexpected key.*extra"),
        (
            lambda state: state.update({"embed.weight": torch.ones(VOCABULARY + 1, 8)}),
            r"size mismatch for embed\.weight: .*\[14, 8\]\) from checkpoint, .*\[13, 8\]",
        ),
    ],
    ids=["missing", "unexpected", "padded"],
)
def test_loading_is_strict_about_the_whole_weights(
    ranks: RankPool, tmp_path: Path, one: tuple[Path, Any, Any], change: Any, message: str
) -> None:
    checkpoint = torch.load(one[0], weights_only=True)
    change(checkpoint["state_dict"])
    torch.save(checkpoint, tmp_path / "changed.ckpt")
    with pytest.raises(RankError, match=message):
        ranks(2, _loads, str(tmp_path / "changed.ckpt"), **TRAINER)


def _used_whole(rank: int, layout: Layout) -> tuple[Tensor, float, bool]:
    trainer = _trainer(layout, max_epochs=1)
    module = Parted()
    _, dp, tp, _ = layout
    trainer.fit(module, rows(8, 4, dp, rank // tp % dp))
    ids = torch.arange(6).view(2, 3)
    with trainer.strategy.unsharded(), torch.no_grad():  # type: ignore[attr-defined]
        assert not any(isinstance(parameter, DTensor) for parameter in module.parameters())
        logits = module(ids)
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    loss = trainer.validate(module, rows(8, 4, dp, rank // tp % dp), verbose=False)[0]["val_loss"]
    return logits, loss, module.head.weight is module.embed.weight


@pytest.mark.parametrize("layout", [(1, 1, 4, 0), (1, 2, 2, 3)], ids=str)
def test_a_trained_module_answers_and_validates_as_in_one_process(ranks: RankPool, layout: Layout) -> None:
    module, trainer = Parted(), quiet(devices=1)
    trainer.fit(module, rows(8, 4))
    expected = module(torch.arange(6).view(2, 3)).detach()
    loss = trainer.validate(module, rows(8, 4), verbose=False)[0]["val_loss"]
    for logits, found, tied in ranks(4, _used_whole, layout, **TRAINER):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
        assert found == pytest.approx(loss, rel=1e-5)
        assert tied


def _from_meta(rank: int, layout: Layout) -> dict[str, Tensor]:
    torch.manual_seed(1000 + rank)
    trainer = _trainer(layout, max_steps=1)
    if layout == ONE:
        trainer = quiet(strategy=FiveD(), devices=1, max_steps=1)
    with trainer.init_module(empty_init=True):
        module = Still()
    assert all(parameter.is_meta for parameter in module.parameters())
    trainer.fit(module, rows(8, 4))
    return trainer.strategy.by_parameter(dict(module.named_parameters()))  # type: ignore[attr-defined]


class Still(Parted):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("layout", [(1, 1, 4, 0), (2, 1, 2, 3)], ids=str)
def test_meta_weights_get_the_values_of_one_process(ranks: RankPool, layout: Layout) -> None:
    arguments = {**TRAINER, "env": {"PL_GLOBAL_SEED": "7"}}
    expected = ranks(1, _from_meta, ONE, **arguments)[0]
    found = ranks(4, _from_meta, layout, **arguments)[0]
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


class Counting(ModelSummary):
    counts: tuple[int, int]

    def summarize(  # type: ignore[override]
        self, summary_data: Any, total_parameters: int, trainable_parameters: int, *_: Any, **__: Any
    ) -> None:
        self.counts = total_parameters, trainable_parameters
        self.names = dict(summary_data)["Name"]


def _counted(rank: int, layout: Layout) -> Any:
    callback = Counting()
    trainer = _trainer(layout, max_steps=1, callbacks=[callback], enable_model_summary=True)
    module = Parted(frozen=("v.",))
    for _ in range(2):
        trainer.fit(module, rows(8, 4))
    return (callback.counts, callback.names) if rank == 0 else None


@pytest.mark.parametrize("layout", [(1, 1, 4, 0), (2, 1, 2, 1)], ids=str)
def test_the_summary_counts_the_whole_model(ranks: RankPool, layout: Layout) -> None:
    module = Parted(frozen=("v.",))
    every = list(module.parameters())
    counts, names = ranks(4, _counted, layout, **TRAINER)[0]
    assert counts == (sum(p.numel() for p in every), sum(p.numel() for p in every if p.requires_grad))
    assert names[:3] == ["embed", "layers", "head"]


class Vector(Parted):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def _refused(rank: int) -> None:
    _trainer((1, 1, 2, 0)).fit(Vector(), rows(8, 4))


def test_optimizers_of_whole_tensors_are_refused(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="LBFGS works on all gradients as one vector, and 2 ranks of the tensor axis"):
        ranks(2, _refused, **TRAINER)


class Writing(Parted):
    """Keeps an average of a weight in a frozen one, and writes to a trained one in its step."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.average = nn.Linear(8, 4 * 3)
        self.average.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.average.weight.mul_(0.5).add_(1.0)
            self.layers[0].mixer.q.weight.clamp_(-0.2, 0.2)
        return super().training_step(batch, batch_idx)


def _written(rank: int, layout: Layout) -> dict[str, Tensor]:
    trainer = _trainer(layout, max_epochs=1)
    module = Writing()
    _, dp, tp, _ = layout
    trainer.fit(module, rows(8, 4, dp, rank // tp % dp))
    return trainer.strategy.full_state_dict()  # type: ignore[attr-defined]


@pytest.mark.parametrize("layout", [(1, 1, 2, 0), (1, 2, 2, 1)], ids=str)
def test_what_a_step_writes_to_weights_is_kept(ranks: RankPool, layout: Layout) -> None:
    alone = Writing()
    quiet(devices=1).fit(alone, rows(8, 4))
    found = ranks(layout[1] * layout[2], _written, layout, **TRAINER)[0]
    torch.testing.assert_close(found, dict(alone.state_dict()), rtol=1e-5, atol=1e-6)

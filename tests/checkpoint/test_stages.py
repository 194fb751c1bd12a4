"""A pipeline's checkpoints, parity and norms are those of the whole module."""

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_5d import FiveD, ZeRO
from lightning_5d.verify import verify
from tests.checkpoint.halves import Halves, Sum, batches, loader
from tests.ranks.pool import RankPool
from tests.trainers import quiet

TRAINER: dict[str, Any] = {"backend": None, "timeout": 90}
ALONE: dict[str, Any] = {"backend": None, "timeout": 90, "env": {"WORLD_SIZE": None}}
STEPS = 4


def _trainer(layout: str, **arguments: Any) -> L.Trainer:
    arguments["use_distributed_sampler"] = False  # all ranks take the same batches, so that the mean is that of one
    if layout == "one":
        return quiet(devices=1, **arguments)
    pp, dp, stage = map(int, layout.split("-"))
    plugins = [Halves()] if pp == 2 else []
    return quiet(strategy=FiveD(*plugins, ZeRO(stage=stage)), devices=pp * dp, **arguments)


def _size(layout: str) -> int:
    return 1 if layout == "one" else int(layout[0]) * int(layout[2])


def _plain(state: Any) -> Any:
    return {key: value for key, value in state.items() if key in ("state_dict", "optimizer_states", "lr_schedulers")}


def _fit(rank: int, layout: str, path: str, how: str, steps: int, resume: str | None, frozen: int) -> None:
    trainer = _trainer(layout, max_epochs=steps // STEPS)
    module = Sum(seed=3 if resume else 0, how=how, frozen=frozen)
    trainer.fit(module, loader(STEPS), ckpt_path=resume)
    trainer.save_checkpoint(path)


def _saved(
    ranks: RankPool,
    folder: Path,
    layout: str,
    how: str,
    steps: int = STEPS,
    resume: Path | None = None,
    frozen: int = 0,
) -> Any:
    path = folder / f"{layout}-{how}-{steps}-{'resumed' if resume else 'fresh'}.ckpt"
    options = ALONE if layout == "one" else TRAINER
    ranks(
        _size(layout), _fit, layout, str(path), how, steps, None if resume is None else str(resume), frozen, **options
    )
    return path, torch.load(path, weights_only=True)


def _same(found: Any, expected: Any) -> None:
    assert list(found["state_dict"]) == list(expected["state_dict"])
    torch.testing.assert_close(found["state_dict"], expected["state_dict"], rtol=1e-5, atol=1e-6)
    assert found["lr_schedulers"] == expected["lr_schedulers"]
    (mine,), (theirs,) = found["optimizer_states"], expected["optimizer_states"]
    assert mine["param_groups"] == theirs["param_groups"]
    assert sorted(mine["state"]) == sorted(theirs["state"])
    for number, entries in theirs["state"].items():
        torch.testing.assert_close(mine["state"][number], entries, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["adam", "sgd", "layers", "names"])
def test_the_file_is_the_one_of_one_process_and_goes_on_in_either(ranks: RankPool, tmp_path: Path, how: str) -> None:
    one_path, one = _saved(ranks, tmp_path, "one", how)
    two_path, two = _saved(ranks, tmp_path, "2-1-0", how)
    _same(two, one)
    _, on = _saved(ranks, tmp_path, "one", how, 2 * STEPS, one_path)
    for layout, start in (("one", two_path), ("2-1-0", one_path), ("2-1-0", two_path)):
        _, found = _saved(ranks, tmp_path, layout, how, 2 * STEPS, start)
        _same(found, on)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_with_sharded_stages(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    one_path, one = _saved(ranks, tmp_path, "one", "adam")
    path, four = _saved(ranks, tmp_path, f"2-2-{stage}", "adam")
    _same(four, one)
    _, on = _saved(ranks, tmp_path, "one", "adam", 2 * STEPS, one_path)
    _, found = _saved(ranks, tmp_path, f"2-2-{stage}", "adam", 2 * STEPS, path)
    _same(found, on)


def test_a_stage_without_trained_weights_leaves_no_trace(ranks: RankPool, tmp_path: Path) -> None:
    _, one = _saved(ranks, tmp_path, "one", "sgd", frozen=3)
    path, two = _saved(ranks, tmp_path, "2-1-0", "sgd", frozen=3)
    _same(two, one)
    assert not any("nothing" in name for name in two["state_dict"])
    _, again = _saved(ranks, tmp_path, "2-1-0", "sgd", 2 * STEPS, path, frozen=3)
    assert list(again["state_dict"]) == list(one["state_dict"])


def _best(rank: int, folder: str) -> tuple[list[str], list[str]]:
    callback = ModelCheckpoint(
        folder, monitor="step", mode="max", save_top_k=2, every_n_train_steps=1, filename="{step}"
    )
    trainer = quiet(
        strategy=FiveD(Halves(), ZeRO()), devices=2, max_steps=STEPS, enable_checkpointing=True, callbacks=[callback]
    )
    module = Sum()
    trainer.fit(module, loader())
    state = trainer.strategy.full_state_dict()  # type: ignore[attr-defined]
    assert {value.device.type for value in state.values()} == {"cpu" if rank == 0 else "meta"}
    return sorted(callback.best_k_models), list(state)


def test_model_checkpoint_and_full_state_dict(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks(2, _best, str(tmp_path), **TRAINER)
    assert found[0] == found[1]
    assert found[0][1] == list(Sum().state_dict())
    assert len(found[0][0]) == 2
    for path in found[0][0]:
        Sum().load_state_dict(torch.load(path, weights_only=True)["state_dict"])


def _strict(rank: int, path: str) -> list[str]:
    said = []
    saved = torch.load(path, weights_only=True)
    for missing, unexpected in ((["layers.0.bias"], []), (["layers.3.bias"], []), ([], ["layers.9.bias"])):
        changed = copy.deepcopy(saved)
        for name in missing:
            del changed["state_dict"][name]
        for name in unexpected:
            changed["state_dict"][name] = torch.zeros(1)
        trainer = _trainer("2-1-0", max_steps=2 * STEPS, max_epochs=-1)
        try:
            trainer.strategy.load_checkpoint = lambda *_, changed=changed, **__: changed  # type: ignore[method-assign]
            trainer.fit(Sum(), loader(), ckpt_path=path)
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_missing_and_unexpected_keys_are_named_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    path, _ = _saved(ranks, tmp_path, "one", "adam")
    found = [ranks(2, _strict, str(path), **TRAINER)][0]
    for said in found:
        assert "Missing key(s) in state_dict: 'layers.0.bias'" in said[0]
        assert "Missing key(s) in state_dict: 'layers.3.bias'" in said[1]
        assert "Unexpected key(s) in state_dict" in said[2]
        assert "layers.9.bias" in said[2]


def _verified(rank: int, stage: int, copies: int, devices: int, broken: bool) -> Any:
    strategy = FiveD(Halves(copies=copies), ZeRO(stage=stage))
    data: list[Tensor] = batches(4)
    if broken:
        Sum.training_step = _without_last  # type: ignore[method-assign]
    return verify(Sum(), data, strategy, devices=devices, gradient_clip_val=0.3)


def _without_last(self: Sum, batch: Tensor, batch_idx: int) -> Tensor:
    return torch.stack([self.first(batch), *(layer(batch) for layer in self.layers)]).sum()


@pytest.mark.parametrize("stage", [0, 3])
def test_verify_takes_the_union_over_stages_and_one_norm(ranks: RankPool, stage: int) -> None:
    for parity in ranks(4, _verified, stage, 1, 4, False, **TRAINER):
        assert parity.passed, parity.table()

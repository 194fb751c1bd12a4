"""Section L and spares: checkpoints are complete, the same for every layout, and written and deleted by one rank."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_5d import FiveD, ZeRO, communication
from tests.modules import TinyLM, Tokens, loader
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.trainers import quiet, whole, zero
from tests.traps.replicas import TRAINER, Replicas, one_and_same, replicated


class SaveOnZero(TinyLM):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.is_global_zero and self.trainer.global_step == 2:
            self.trainer.save_checkpoint(self.path)


def _save_on_zero(rank: int, stage: int, axis: str | None, path: str) -> None:
    communication.PATIENCE_SECONDS = 2.0
    trainer = replicated(stage, 4, axis) if axis else zero(stage, 2)
    trainer.fit(SaveOnZero(path), loader(32))


class SlowRank0(SaveOnZero):
    """All ranks save, rank 0 long after the others."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 2:
            if self.trainer.is_global_zero:
                time.sleep(1.0)
            self.trainer.save_checkpoint(self.path)


def _slow_rank_0(rank: int, stage: int, path: str) -> int:
    trainer = zero(stage, 2)
    with pytest.MonkeyPatch.context() as patch:  # the process goes on to other tests
        patch.setattr(communication, "PATIENCE_SECONDS", 0.5)
        trainer.fit(SlowRank0(path), loader(16))
    return trainer.global_step


@pytest.mark.parametrize("stage", [0, 3])
def test_64_others_wait_for_rank_0_as_long_as_it_takes(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    assert ranks(2, _slow_rank_0, stage, str(tmp_path / "x.ckpt"), **TRAINER) == [4, 4]
    assert torch.load(tmp_path / "x.ckpt", weights_only=True)["global_step"] == 2


@pytest.mark.parametrize(("stage", "axis"), [(0, None), (1, None), (3, None), (2, "tp")])
def test_64_saving_on_rank_0_alone_is_a_quick_clear_error(
    ranks: RankPool, tmp_path: Path, stage: int, axis: str | None
) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)waited 2 s in save_checkpoint for rank 1.*every rank"):
        ranks(4 if axis else 2, _save_on_zero, stage, axis, str(tmp_path / "x.ckpt"), **TRAINER)
    assert time.monotonic() - started < 30
    assert not (tmp_path / "x.ckpt").exists()


class Uneven(TinyLM):
    """Sizes that neither 2, 3 nor 4 divides, a scalar, a frozen weight, momenta, and a learning rate that moves."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(layers=2, width=7, seed=seed)
        self.gain = nn.Parameter(torch.tensor(1.0 + seed))
        self.layers[0].norm.requires_grad_(False)  # type: ignore[union-attr,operator]
        self.read: list[list[int]] = []
        self.losses: list[float] = []

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.gain

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        mean = self.trainer.strategy.reduce(loss.detach().clone())
        self.losses.append(float(mean))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Global(L.LightningDataModule):
    """The same 12 rows in every step, whatever the layout; with `order` step k has rows of its own."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.rows = Tokens(12 * steps)

    def train_dataloader(self) -> DataLoader[Tensor]:
        assert self.trainer is not None
        place = self.trainer.strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]
        sampler = DistributedSampler(self.rows, shuffle=False, **place)  # type: ignore[var-annotated]
        return DataLoader(self.rows, batch_size=12 // place["num_replicas"], sampler=sampler)


Layout = tuple[int, int, int, str | None]  # stage, ranks, replicate, replica axis


def _layout(layout: Layout, **arguments: Any) -> L.Trainer:
    stage, ranks, replicate, axis = layout
    return replicated(stage, ranks, axis, **arguments) if axis else zero(stage, ranks, replicate, **arguments)


def _relaid(rank: int, layout: Layout, part: str, folder: str) -> dict[str, Any]:
    path = Path(folder) / "part.ckpt"
    # Epochs of 3 steps: the break comes at the end of one.
    trainer = _layout(layout, max_epochs=1 if part == "first" else 3)
    module = Uneven(seed=0 if part != "second" else 77)
    trainer.fit(module, Global(3), ckpt_path=path if part == "second" else None)
    if part == "first":
        trainer.save_checkpoint(path)
    state = trainer.strategy.optimizer_state(trainer.optimizers[0])
    return {
        "weights": whole(module),
        "state": state["state"],
        "lr": [group["lr"] for group in state["param_groups"]],
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "losses": module.losses[-6:],
    }


LAYOUTS: list[Layout] = [
    (0, 2, 1, None),
    (1, 3, 1, None),
    (2, 4, 1, None),
    (3, 3, 1, None),
    (3, 4, 2, None),
    (3, 1, 1, None),
    (2, 4, 1, "tp"),
]


@pytest.mark.parametrize("place", range(len(LAYOUTS)))
def test_65_a_run_resumes_under_any_other_layout(ranks: RankPool, tmp_path: Path, place: int) -> None:
    # Around the ring of layouts: each is saved from once and loaded into twice.
    first = LAYOUTS[place]
    ranks(first[1], _relaid, first, "first", str(tmp_path), **TRAINER)
    reference = ranks(2, _relaid, LAYOUTS[0], "straight", str(tmp_path), **TRAINER)[0]
    for step in (1, 3):
        second = LAYOUTS[(place + step) % len(LAYOUTS)]
        resumed = ranks(second[1], _relaid, second, "second", str(tmp_path), **TRAINER)
        for found in resumed:
            torch.testing.assert_close(found["weights"], reference["weights"], rtol=1e-4, atol=1e-5)
            assert found["losses"] == pytest.approx(reference["losses"], rel=1e-5)
            assert (found["step"], found["epoch"]) == (9, 3)
            assert found["lr"] == pytest.approx(reference["lr"])
        torch.testing.assert_close(resumed[0]["state"], reference["state"], rtol=1e-4, atol=1e-6)


def _middle(rank: int, layout: Layout, part: str, folder: str, steps: int) -> list[float]:
    path = Path(folder) / "middle.ckpt"
    trainer = _layout(layout, max_steps=steps if part == "first" else 11, max_epochs=-1)
    module = Uneven(seed=0 if part != "second" else 77)
    trainer.fit(module, Global(4), ckpt_path=path if part == "second" else None)
    if part == "first":
        trainer.save_checkpoint(path)
    return module.losses


@pytest.mark.parametrize("steps", [2, 7])
@pytest.mark.parametrize(("first", "second"), [((1, 2, 1, None), (1, 2, 1, None)), ((3, 2, 1, None), (0, 3, 1, None))])
def test_65_a_run_resumes_in_the_middle_of_an_epoch_with_the_data_it_has_not_seen(
    ranks: RankPool, tmp_path: Path, first: Layout, second: Layout, steps: int
) -> None:
    # Epochs of 4 steps: the break comes in the first or in the second. (After `max_steps` at the very end of an epoch Lightning
    # itself, in one process, too, takes its first batch twice.)
    ranks(first[1], _middle, first, "first", str(tmp_path), steps, **TRAINER)
    straight = ranks(second[1], _middle, second, "straight", str(tmp_path), steps, **TRAINER)[0]
    for losses in ranks(second[1], _middle, second, "second", str(tmp_path), steps, **TRAINER):
        assert losses == pytest.approx(straight[steps:], rel=1e-5)


def _shuffled(rank: int, part: str, folder: str, workers: int) -> list[list[int]]:
    L.seed_everything(4, verbose=False)
    callback = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = zero(1, 2, max_epochs=3, callbacks=[callback], enable_checkpointing=True)
    module = Reading()
    data = DataLoader(range(16), batch_size=2, shuffle=True, num_workers=workers)  # type: ignore[arg-type]
    trainer.fit(module, data, ckpt_path=Path(folder) / "step=6.ckpt" if part == "second" else None)
    return module.rows


class Reading(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.rows: list[list[int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.rows.append(batch.tolist())
        return self.w.sum() * batch.float().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("workers", [0, 1])
def test_65_a_shuffled_epoch_goes_on_where_it_was(ranks: RankPool, tmp_path: Path, workers: int) -> None:
    straight = ranks(2, _shuffled, "first", str(tmp_path), workers, **TRAINER)
    resumed = ranks(2, _shuffled, "second", str(tmp_path), workers, **TRAINER)
    for rank in range(2):
        assert len(straight[rank]) == 12
        assert resumed[rank] == straight[rank][6:]


class Interrupted(TorchCheckpointIO):
    """Is killed while it writes its third file: some bytes are on the disk, and then nothing more."""

    def __init__(self) -> None:
        self.count = 0

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.count += 1
        if self.count == 3:
            import os
            import shutil
            import signal

            def die(*_: Any, **__: Any) -> None:
                os.kill(os.getpid(), signal.SIGKILL)

            shutil.move = die  # type: ignore[assignment]
            os.replace = os.rename = die  # type: ignore[assignment]
        super().save_checkpoint(checkpoint, path, storage_options)


def _killed(rank: int, stage: int, folder: str, first: bool) -> Any:
    callback = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_last=False)
    plugins = [Interrupted()] if first and rank == 0 else []
    trainer = quiet(
        strategy=FiveD(ZeRO(stage=stage)),
        devices=2,
        callbacks=[callback],
        plugins=plugins,
        enable_checkpointing=True,
        max_epochs=4,
    )
    module = Uneven(seed=0 if first else 5)
    newest = max(Path(folder).glob("epoch=*.ckpt"), default=None, key=lambda path: path.name)
    trainer.fit(module, Global(3), ckpt_path=None if first else newest)
    return (
        newest and newest.name,
        trainer.global_step,
        len(module.losses),
        sorted(p.name for p in Path(folder).iterdir()),
    )


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_67_a_kill_during_a_save_leaves_complete_files_only_and_the_next_run_goes_on(
    ranks: RankPool, tmp_path: Path, stage: int
) -> None:
    with pytest.raises(RankError, match="SIGKILL"):
        ranks(2, _killed, stage, str(tmp_path), True, **TRAINER)
    complete = {path.name for path in tmp_path.glob("*.ckpt")}
    assert complete == {"epoch=0.ckpt", "epoch=1.ckpt"}
    for path in tmp_path.glob("*.ckpt"):
        assert torch.load(path, weights_only=True)["global_step"] in (3, 6)
    newest, steps, made, files = one_and_same(ranks(2, _killed, stage, str(tmp_path), False, **TRAINER))
    assert (newest, steps, made) == ("epoch=1.ckpt", 12, 6)
    assert {"epoch=2.ckpt", "epoch=3.ckpt"} <= set(files)


class LaterUsed(L.LightningModule):
    """Its second layer has no gradient in the first epoch; from the checkpoint on the first may be frozen."""

    def __init__(self, freeze: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.layers[0].requires_grad_(not freeze)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.layers[0](batch[:, :5].float() / 13)
        if self.current_epoch:
            x = self.layers[1](x)
        return x.pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def _later(rank: int, stage: int, ranks: int, part: str, folder: str) -> Any:
    path = Path(folder) / "later.ckpt"
    trainer = zero(stage, ranks, max_epochs=1 if part == "first" else 2)
    module = LaterUsed(freeze=part == "frozen", seed=0 if part in ("first", "straight") else 8)
    trainer.fit(module, Global(2), ckpt_path=path if part in ("second", "frozen") else None)
    if part == "first":
        trainer.save_checkpoint(path)
    return whole(module), trainer.strategy.optimizer_state(trainer.optimizers[0])["state"]


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 1), (2, 2), (3, 3), (3, 0)])
def test_68_state_that_does_not_exist_yet_starts_fresh_and_that_of_frozen_weights_is_kept(
    ranks: RankPool, tmp_path: Path, first: int, second: int
) -> None:
    ranks(2, _later, first, 2, "first", str(tmp_path), **TRAINER)
    saved = torch.load(tmp_path / "later.ckpt", weights_only=True)
    assert set(saved["optimizer_states"][0]["state"]) == {0, 1}
    straight = ranks(2, _later, second, 2, "straight", str(tmp_path), **TRAINER)[0]
    resumed = ranks(2, _later, second, 2, "second", str(tmp_path), **TRAINER)[0]
    torch.testing.assert_close(resumed, straight, rtol=1e-5, atol=1e-6)
    weights, state = ranks(2, _later, second, 2, "frozen", str(tmp_path), **TRAINER)[0]
    for index, name in enumerate(["layers.0.weight", "layers.0.bias"]):
        torch.testing.assert_close(weights[name], saved["state_dict"][name], rtol=0, atol=0)
        kept = saved["optimizer_states"][0]["state"][index]
        torch.testing.assert_close(state[index], kept, rtol=0, atol=0)
    assert float(state[2]["step"]) == 2
    assert not torch.equal(weights["layers.1.weight"], saved["state_dict"]["layers.1.weight"])


class Counting(TorchCheckpointIO):
    """Notes what this rank writes and deletes."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.deleted: list[str] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.written.append(Path(path).name)
        super().save_checkpoint(checkpoint, path, storage_options)

    def remove_checkpoint(self, path: Any) -> None:
        self.deleted.append(Path(path).name)
        super().remove_checkpoint(path)


def _counted(rank: int, axis: str | None, folder: str) -> Any:
    io = Counting()
    callback = ModelCheckpoint(folder, filename="{epoch}", save_top_k=1)
    strategy = FiveD(ZeRO(stage=3)) if axis is None else FiveD(ZeRO(stage=3), Replicas(name=axis))
    trainer = quiet(
        strategy=strategy,
        devices=2 if axis is None else 4,
        callbacks=[callback],
        plugins=[io],
        enable_checkpointing=True,
        max_epochs=3,
    )
    trainer.fit(TinyLM(), loader(4))
    trainer.strategy.barrier()
    return io.written, io.deleted, sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize("axis", [None, "tp", "pp"])
def test_spare_one_rank_writes_and_deletes(ranks: RankPool, tmp_path: Path, axis: str | None) -> None:
    first, *others = ranks(4 if axis else 2, _counted, axis, str(tmp_path), **TRAINER)
    assert first == (["epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt"], ["epoch=0.ckpt", "epoch=1.ckpt"], first[2])
    assert all(other == ([], [], first[2]) for other in others)
    assert first[2] == ["epoch=2.ckpt"]


class Configured(TinyLM):
    """Hyperparameters as Hydra gives them."""

    def __init__(self, settings: Mapping[str, Any], sizes: Any = None) -> None:
        super().__init__()
        self.hparams.clear()
        self.save_hyperparameters()
        self.hparams["lr"] = settings["lr"]


def _configured(rank: int, folder: str) -> Any:
    path = Path(folder) / "configured.ckpt"
    settings: DictConfig = OmegaConf.create({"lr": 0.01, "nested": {"list": [1, 2], "ref": "${settings.lr}"}})
    root = OmegaConf.create({"settings": settings})
    module = Configured(root.settings, OmegaConf.create([1, {"two": 3}]))
    trainer = zero(1, 2, max_epochs=1)
    trainer.fit(module, loader(4))
    trainer.save_checkpoint(path)
    again = zero(1, 2, max_epochs=2)
    again.fit(Configured(root.settings, OmegaConf.create([1])), loader(4), ckpt_path=path)
    return again.global_step


def test_spare_a_checkpoint_of_a_run_configured_by_hydra_holds_plain_containers(
    ranks: RankPool, tmp_path: Path
) -> None:
    assert ranks(2, _configured, str(tmp_path), **TRAINER) == [2, 2]
    saved = torch.load(tmp_path / "configured.ckpt", weights_only=True)
    settings = saved["hyper_parameters"]["settings"]
    assert settings == {"lr": 0.01, "nested": {"list": [1, 2], "ref": 0.01}}
    assert type(settings) is dict
    assert saved["hyper_parameters"]["sizes"] == [1, {"two": 3}]

"""The whole Trainer works under FiveD: what Lightning does in one process it does here, with the same numbers."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchmetrics import MeanMetric

from tests.modules import TinyLM, Tokens, loader
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.trainers import plain, quiet, whole, zero

STAGES = [0, 1, 2, 3]
TRAINER = {"backend": None, "timeout": 50.0}


def ordered(count: int, batch_size: int, trainer: L.Trainer, seed: int = 1) -> DataLoader[Tensor]:
    """A loader whose global batch k holds rows k*n, k*n+1, … whatever the number of ranks."""
    place = trainer.strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]
    sampler = DistributedSampler(Tokens(count, seed), shuffle=False, **place)  # type: ignore[arg-type,var-annotated]
    return DataLoader(Tokens(count, seed), batch_size=batch_size, sampler=sampler)


class Data(L.LightningDataModule):
    """Same global batches in one process and in many."""

    def __init__(self, count: int = 16, global_batch: int = 4, val: int = 8) -> None:
        super().__init__()
        self.count, self.global_batch, self.val = count, global_batch, val

    def _loader(self, count: int, seed: int) -> DataLoader[Tensor]:
        trainer = self.trainer
        assert trainer is not None
        if trainer.world_size == 1 and not hasattr(trainer.strategy, "mesh"):
            return loader(count, self.global_batch, seed)
        return ordered(count, self.global_batch // trainer.world_size, trainer, seed)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(self.count, 1)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(self.val, 2)

    def test_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(self.val, 3)


def _fit_and_evaluate(rank: int, stage: int | None, ranks: int, folder: str) -> dict[str, Any]:
    callbacks = [
        ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}"),
        EarlyStopping("val_loss", patience=3),
        LearningRateMonitor(),
    ]
    logger = CSVLogger(folder, name="csv", version=0)
    arguments: dict[str, Any] = {
        "callbacks": callbacks,
        "logger": logger,
        "enable_checkpointing": True,
        "max_epochs": 3,
        "num_sanity_val_steps": 2,
        "gradient_clip_val": 0.5,
        "log_every_n_steps": 1,
    }
    trainer = quiet(**arguments) if stage is None else zero(stage, ranks, **arguments)
    module, data = TinyLM(), Data()
    before = trainer.validate(module, data, verbose=False)
    trainer.fit(module, data)
    fitted = plain(trainer.callback_metrics)
    tested = trainer.test(module, data, ckpt_path="best", verbose=False)
    best = Path(callbacks[0].best_model_path).name  # type: ignore[attr-defined]
    return {"before": before, "fitted": fitted, "tested": tested, "best": best, "weights": whole(module)}


@functools.cache
def _alone(pool: RankPool, function: Callable[..., Any], *arguments: Any) -> Any:
    """What one process finds, once for all stages."""
    return pool(1, function, *arguments, **TRAINER, env={"WORLD_SIZE": None})[0]


def assert_close(one: Any, other: Any, tolerance: float = 1e-5) -> None:
    """Nested equality to a relative tolerance."""
    torch.testing.assert_close(one, other, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_fit_validate_test_equal_one_process(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    one = ranks(1, _fit_and_evaluate, None, 1, str(tmp_path / "one"), **TRAINER, env={"WORLD_SIZE": None})[0]
    for found in ranks(2, _fit_and_evaluate, stage, 2, str(tmp_path / "two"), **TRAINER):
        assert found["best"] == one["best"]
        for key in ("before", "fitted", "tested", "weights"):
            # With two ranks the last step's loss is that of one rank's half batch unless it is reduced.
            assert_close(found[key], one[key])
    files = {path.name for path in (tmp_path / "two").iterdir()}
    assert files == {path.name for path in (tmp_path / "one").iterdir()}
    assert "last.ckpt" in files
    rows = [(tmp_path / name / "csv/version_0/metrics.csv").read_text().splitlines() for name in ("one", "two")]
    assert len(rows[0]) == len(rows[1])
    assert rows[0][0] == rows[1][0]


def _interrupted(rank: int, first: tuple[int, int], second: tuple[int, int] | None, folder: str) -> dict[str, Any]:
    """Trains 2 epochs, then a fresh module for 2 more from the checkpoint (or 4 in one go)."""
    stage, ranks = first
    path = Path(folder) / "half.ckpt"
    data = Data(global_batch=12, count=24)
    if second is None:
        trainer, module = zero(stage, ranks, max_epochs=4), TinyLM()
        trainer.fit(module, data)
    else:
        if not path.exists():
            trainer, module = zero(stage, ranks, max_epochs=2), TinyLM()
            trainer.fit(module, data)
            trainer.save_checkpoint(path)
            return {}
        trainer, module = zero(*second, max_epochs=4), TinyLM(seed=99)
        trainer.fit(module, data, ckpt_path=path)
    states = [trainer.strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers]
    return {
        "weights": whole(module),
        "step": trainer.global_step,
        "states": states,
        "metrics": plain(trainer.callback_metrics),
    }


@pytest.mark.parametrize(
    ("first", "second"),
    [((1, 2), (1, 2)), ((3, 2), (3, 2)), ((0, 2), (3, 3)), ((3, 3), (1, 2)), ((2, 4), (2, 1))],
)
def test_resume_equals_a_run_without_a_break(
    ranks: RankPool, tmp_path: Path, first: tuple[int, int], second: tuple[int, int]
) -> None:
    ranks(first[1], _interrupted, first, second, str(tmp_path), **TRAINER)
    straight = ranks(second[1], _interrupted, second, None, str(tmp_path), **TRAINER)[0]
    resumed = ranks(second[1], _interrupted, first, second, str(tmp_path), **TRAINER)[0]
    assert straight["step"] == resumed["step"] == 8
    assert_close(resumed["weights"], straight["weights"])
    assert_close(resumed["metrics"], straight["metrics"])
    for one, other in zip(resumed["states"], straight["states"], strict=True):
        assert_close(one["state"], other["state"])


def test_a_checkpoint_is_that_of_one_process(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, _interrupted, (3, 2), (3, 2), str(tmp_path), **TRAINER)
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    module = TinyLM()
    assert list(saved["state_dict"]) == list(module.state_dict())
    assert all(type(tensor) is Tensor for tensor in saved["state_dict"].values())
    restored = TinyLM.load_from_checkpoint(tmp_path / "half.ckpt")
    trainer = quiet(max_epochs=3)
    trainer.fit(restored, loader(24, 12), ckpt_path=tmp_path / "half.ckpt")  # plain Lightning goes on from it
    assert trainer.global_step == 6


class Adversarial(L.LightningModule):
    """Two optimizers by hand, as in a GAN: two backwards and two steps in one training_step."""

    def __init__(self, toggle: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggle = toggle
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.scale = nn.Parameter(torch.ones(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc,attr-defined]
        x = batch[:, :4].float() / 13
        if self.toggle:
            self.toggle_optimizer(first)
        loss = self.critic(self.generator(x) * self.scale).mean()
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        first.step()
        if self.toggle:
            self.untoggle_optimizer(first)
            self.toggle_optimizer(second)
        loss = (self.critic(x) - self.critic((self.generator(x) * self.scale).detach())).pow(2).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        if self.toggle:
            self.untoggle_optimizer(second)
        self.log("critic", loss, sync_dist=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        generator = [*self.generator.parameters(), self.scale]
        return [torch.optim.Adam(generator, lr=0.02), torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)]


def _adversarial(rank: int, stage: int | None, ranks: int, toggle: bool) -> dict[str, Any]:
    trainer = quiet(max_epochs=2) if stage is None else zero(stage, ranks, max_epochs=2)
    module = Adversarial(toggle)
    trainer.fit(module, Data())
    return {"weights": whole(module), "metrics": plain(trainer.callback_metrics), "step": trainer.global_step}


@pytest.mark.parametrize("toggle", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_manual_optimization_with_two_optimizers_equals_one_process(ranks: RankPool, stage: int, toggle: bool) -> None:
    one = _alone(ranks, _adversarial, None, 1, toggle)
    for found in ranks(2, _adversarial, stage, 2, toggle, **TRAINER):
        assert_close(found, one)


class Measured(TinyLM):
    """Metrics of torchmetrics in the steps, a plateau scheduler on one of them, two validation loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(batch.float().mean())
        self.log("token_mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss/dataloader_idx_0"},
        }


class TwoValidations(Data):
    def val_dataloader(self) -> Any:
        return [self._loader(8, 2), self._loader(4, 5)]


def _measured(rank: int, stage: int | None, ranks: int) -> dict[str, Any]:
    trainer = quiet(max_epochs=3) if stage is None else zero(stage, ranks, max_epochs=3)
    module = Measured()
    trainer.fit(module, TwoValidations())
    metrics = plain(trainer.callback_metrics)
    return {"metrics": metrics, "lr": trainer.optimizers[0].param_groups[0]["lr"], "weights": whole(module)}


@pytest.mark.parametrize("stage", STAGES)
def test_metrics_plateau_and_two_validation_loaders_equal_one_process(ranks: RankPool, stage: int) -> None:
    one = _alone(ranks, _measured, None, 1)
    assert one["lr"] < 0.1
    for found in ranks(2, _measured, stage, 2, **TRAINER):
        assert_close(found, one)


def _predict(rank: int, stage: int, ranks: int, count: int) -> list[list[int]]:
    trainer = zero(stage, ranks)
    module = TinyLM()
    outputs = trainer.predict(module, loader(count, 1))
    assert outputs is not None
    return [row.flatten().tolist() for row in outputs]  # type: ignore[union-attr]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("count", [4, 5])
def test_predict_gives_every_row_once_even_when_ranks_have_different_counts(
    ranks: RankPool, stage: int, count: int
) -> None:
    module = TinyLM()
    expected = [module(row[None]).argmax(-1).flatten().tolist() for row in Tokens(count)]
    found = ranks(2, _predict, stage, 2, count, **TRAINER)
    assert found[0] == expected[0::2]
    assert found[1] == expected[1::2]


class Stream(IterableDataset[Tensor]):
    """Rank r yields `counts[r]` rows."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def __iter__(self) -> Any:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        yield from (Tokens(32, seed=rank)[i] for i in range(self.counts[rank]))


def _stream(rank: int, stage: int, counts: list[int]) -> int:
    trainer = zero(stage, len(counts), max_epochs=2)
    module = TinyLM()
    trainer.fit(module, DataLoader(Stream(counts), batch_size=1), DataLoader(Stream(counts), batch_size=1))
    return trainer.global_step


@pytest.mark.parametrize("stage", [0, 3])
def test_uneven_streams_end_together_at_the_shortest(ranks: RankPool, stage: int) -> None:
    assert ranks(2, _stream, stage, [10, 15], **TRAINER) == [20, 20]


def _limited(rank: int, flags: dict[str, Any]) -> tuple[int, float]:
    trainer = zero(1, 2, **flags)
    module = TinyLM()
    trainer.fit(module, Data(count=32))
    return trainer.global_step, float(trainer.callback_metrics["train_loss_step"])


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ({"limit_train_batches": 3, "limit_val_batches": 1}, 3),
        ({"overfit_batches": 2, "max_epochs": 3}, 6),
        ({"fast_dev_run": 2}, 2),
        ({"max_steps": 5, "max_epochs": -1}, 5),
        ({"max_epochs": 2, "accumulate_grad_batches": 4}, 4),
        ({"val_check_interval": 2}, 8),
    ],
)
def test_loop_flags_mean_what_they_mean_in_lightning(ranks: RankPool, flags: dict[str, Any], steps: int) -> None:
    results = ranks(2, _limited, flags, **TRAINER)
    assert [step for step, _ in results] == [steps, steps]
    assert results[0][1] == results[1][1]


class Closured(TinyLM):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


class Fused(TinyLM):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


class PartlyFrozen(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.layers[0].requires_grad_(False)  # type: ignore[operator]
        self.layers[1].up.requires_grad_(False)  # type: ignore[union-attr,operator]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Grouped(TinyLM):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 2e-2}, {"params": []}]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


def _trained(rank: int, kind: type[TinyLM], stage: int | None, ranks: int) -> dict[str, Tensor]:
    trainer = quiet(max_epochs=2) if stage is None else zero(stage, ranks, max_epochs=2)
    module = kind()
    trainer.fit(module, Data())
    return whole(module)


@pytest.mark.parametrize("kind", [Fused, PartlyFrozen, Grouped])
@pytest.mark.parametrize("stage", STAGES)
def test_optimizers_and_frozen_weights_equal_one_process(ranks: RankPool, kind: type[TinyLM], stage: int) -> None:
    one = _alone(ranks, _trained, kind, None, 1)
    for found in ranks(2, _trained, kind, stage, 2, **TRAINER):
        assert_close(found, one)


def test_an_optimizer_that_calls_its_closure_several_times_equals_one_process(ranks: RankPool) -> None:
    one = _alone(ranks, _trained, Closured, None, 1)
    for found in ranks(2, _trained, Closured, 0, 2, **TRAINER):
        torch.testing.assert_close(found, one, rtol=1e-3, atol=1e-5)  # quasi-Newton steps amplify rounding


def test_an_optimizer_that_needs_the_whole_gradient_is_refused_where_it_is_sharded(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"LBFGS.*stage=0"):
        ranks(2, _trained, Closured, 1, 2, **TRAINER)


def _validation_traffic(rank: int, stage: int) -> dict[str, int]:
    trainer = zero(stage, 2)
    trainer.validate(TinyLM(), loader(16, 2), verbose=False)
    return dict(trainer.strategy.parallelized[0].engine.traffic.calls)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("stage", "gathers"), [(1, 4), (2, 4), (3, 4 * 4)])
def test_validation_gathers_once_where_parameters_are_held_anyway(ranks: RankPool, stage: int, gathers: int) -> None:
    """3 blocks and the root make 4 groups; 4 batches."""
    assert ranks(2, _validation_traffic, stage, **TRAINER)[0]["all_gather"] == gathers


class Averaged(L.Callback):
    """Swaps other weights in for validation, through `.data`, as many averaging callbacks do."""

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.kept = [parameter.data.clone() for parameter in pl_module.parameters()]
        for parameter in pl_module.parameters():
            parameter.data.mul_(0.0)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for parameter, value in zip(pl_module.parameters(), self.kept, strict=True):
            parameter.data.copy_(value)


def _swapped(rank: int, stage: int | None, ranks: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {"max_epochs": 2, "callbacks": [Averaged()], "val_check_interval": 2}
    trainer = quiet(**arguments) if stage is None else zero(stage, ranks, **arguments)
    module = TinyLM()
    trainer.fit(module, Data())
    return {"weights": whole(module), "metrics": plain(trainer.callback_metrics)}


@pytest.mark.parametrize("stage", STAGES)
def test_weights_swapped_around_validation_are_the_ones_validated(ranks: RankPool, stage: int) -> None:
    one = _alone(ranks, _swapped, None, 1)
    assert one["metrics"]["val_loss"] == pytest.approx(2.564949)  # all weights 0: the logarithm of 13
    for found in ranks(2, _swapped, stage, 2, **TRAINER):
        assert_close(found, one)


def _in_a_group(rank: int) -> int:
    assert torch.distributed.is_initialized()
    trainer = zero(1, 2, max_epochs=2)
    trainer.fit(TinyLM(), loader(8))
    assert torch.distributed.is_initialized()  # it was the user's, and stays
    return trainer.global_step


def test_a_process_group_that_the_user_has_made_is_used(ranks: RankPool) -> None:
    assert ranks(2, _in_a_group, timeout=50.0) == [4, 4]

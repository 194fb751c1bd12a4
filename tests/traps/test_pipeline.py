"""Section I, and what other sections say of stages: a pipeline trains, evaluates and logs as one process does, and never waits."""

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_5d import FiveD, FiveDPrecision, PipelineParallel, ZeRO
from lightning_5d.loss_scaling import LossScaling
from tests.modules import VOCABULARY, TinyLM, Tokens, loader
from tests.pipeline_parallel.recorded import Record, fit, fit_alone, rows, worst
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.trainers import plain, quiet
from tests.traps.replicas import TRAINER, one_and_same

Case = tuple[Callable[[], Any], Callable[..., Any], PipelineParallel, dict[str, Any]]


def _each(rank: int, cases: list[Case], ranks: int, data_ranks: int) -> list[dict[str, Any]]:
    return [
        fit(rank, module, data, partial(FiveD, pipeline), ranks, data_ranks, **arguments)
        for module, data, pipeline, arguments in cases
    ]


def _equal_one_process(ranks: RankPool, world: int, *cases: Case, data_ranks: int = 1) -> None:
    found = ranks(world, _each, list(cases), world, data_ranks, **TRAINER)
    for number, (module, data, _, arguments) in enumerate(cases):
        expected = fit_alone(module, data, **arguments)
        differences = worst([each[number] for each in found], expected)
        assert max(differences.values()) < 1e-5, (number, differences)
        for each in found:
            assert each[number]["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)


def test_43_fewer_microbatches_than_stages_and_rows_than_microbatches_train_right(ranks: RankPool) -> None:
    few = [
        PipelineParallel(4, schedule="afab", microbatches=2),
        PipelineParallel(4, schedule="1f1b", microbatches=2),
        PipelineParallel(4, schedule="interleaved_1f1b", chunks=2, microbatches=2, group_size=2),
    ]
    many = [PipelineParallel(4, schedule=name, microbatches=8) for name in ("1f1b", "zb_h1", "v_half")]
    module = partial(TinyLM, layers=9)
    _equal_one_process(
        ranks,
        4,
        *((module, partial(rows, 8, 4), pipeline, {}) for pipeline in few),
        *((module, partial(rows, 8, 3), pipeline, {}) for pipeline in many),  # the last batch has 2 rows
    )


def _with_validation(rank: int, module: Any, strategy: Any, arguments: dict[str, Any]) -> Any:
    record = Record()
    trainer = quiet(callbacks=[record], use_distributed_sampler=False, **strategy(), **arguments)
    trainer.fit(module(), rows(18, 6), rows(10, 6))
    return {**record(), "metrics": plain(trainer.callback_metrics)}


def _stages(*plugins: Any, ranks: int) -> dict[str, Any]:
    return {"strategy": FiveD(*plugins), "devices": ranks}


def test_44_batches_that_do_not_divide_and_47_evaluation_before_training_equal_one_process(ranks: RankPool) -> None:
    arguments = {"num_sanity_val_steps": 2}
    strategy = partial(_stages, PipelineParallel(3, microbatches=4), ranks=3)
    module = partial(TinyLM, layers=4)
    found = ranks(3, _with_validation, module, strategy, arguments, **TRAINER)
    expected = _with_validation(0, module, dict, {})  # nothing of the sanity check may stay
    differences = worst(found, expected)
    assert max(differences.values()) < 1e-5, differences
    assert {"train_loss_step", "train_loss_epoch", "val_loss"} <= expected["metrics"].keys()
    for each in found:
        assert each["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)


class Lengths(Dataset[Tensor]):
    """Batches of 4 rows, each of the given length."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(3)
        self.batches = [torch.randint(0, VOCABULARY, (4, length + 1), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Tensor:
        return self.batches[index]


def _lengths(*lengths: int, data_ranks: int = 1, data_rank: int = 0) -> Any:
    return DataLoader(Lengths(lengths), batch_size=None)


def test_46_lengths_may_change_from_batch_to_batch(ranks: RankPool) -> None:
    module, window = partial(TinyLM, layers=4), {"accumulate_grad_batches": 2}
    _equal_one_process(
        ranks,
        3,
        (module, partial(_lengths, 6, 3, 6, 3), PipelineParallel(3, microbatches=4), window),
        (module, partial(_lengths, 3, 6, 6, 2), PipelineParallel(3, microbatches=2, schedule="zb_h1"), window),
    )


class Attending(nn.Module):
    """Mixes the positions that a mask leaves, and gives each a place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        scores = (x @ x.mT + positions[:, None, :]).masked_fill(~mask[:, None, :], -torch.inf)
        return x + self.linear(scores.softmax(-1) @ self.norm(x))


class Padded(L.LightningModule):
    """Rows of different length; each row's loss is the mean over its own tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleList(Attending() for _ in range(4))
        self.head = nn.Linear(8, VOCABULARY)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x, mask = self.embed(batch["ids"]), batch["mask"]
        positions = mask.cumsum(-1).float() / 7
        for layer in self.layers:
            x = layer(x, mask, positions=positions)
        losses = F.cross_entropy(self.head(x).mT, batch["ids"].roll(1, -1), reduction="none") * mask
        loss = (losses.sum(-1) / mask.sum(-1)).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _padded(data_ranks: int = 1, data_rank: int = 0) -> Any:
    ids = Tokens(8).rows
    mask = torch.arange(ids.shape[1]) < torch.tensor([7, 2, 5, 3, 1, 4, 6, 2])[:, None]
    return DataLoader([{"ids": i, "mask": m} for i, m in zip(ids, mask, strict=True)], batch_size=4)  # type: ignore[arg-type]


def test_49_each_row_meets_its_own_mask_on_every_stage(ranks: RankPool) -> None:
    _equal_one_process(ranks, 4, (Padded, _padded, PipelineParallel(4, microbatches=4), {}))


class CallsItself(TinyLM):
    """A hook of one rank calls the model."""

    def on_train_epoch_end(self) -> None:
        if self.global_rank == 0:
            self(Tokens(2).rows)


def _evaluate(rank: int) -> Any:
    module = TinyLM(layers=3)
    trainer = quiet(strategy=FiveD(PipelineParallel(2, microbatches=2)), devices=2)
    (validated,) = trainer.validate(module, loader(4), verbose=False)
    (tested,) = trainer.test(module, loader(4), verbose=False)
    predicted = trainer.predict(module, loader(5))
    return validated, tested, [each.tolist() for each in predicted or []]


def _calls_itself(rank: int) -> None:
    quiet(strategy=FiveD(PipelineParallel(2, microbatches=2)), devices=2).fit(CallsItself(), loader(4))


def test_50_evaluation_gives_every_rank_the_results_of_one_process(ranks: RankPool) -> None:
    validated, tested, predicted = one_and_same(ranks(2, _evaluate, **TRAINER))
    module, trainer = TinyLM(layers=3), quiet(devices=1)
    assert validated == pytest.approx(trainer.validate(module, loader(4), verbose=False)[0], rel=1e-5)
    assert tested == pytest.approx(trainer.test(module, loader(4), verbose=False)[0], rel=1e-5)
    assert predicted == [each.tolist() for each in trainer.predict(module, loader(5)) or []]


def ends_at_once(ranks: RankPool, world: int, says: str, function: Any, *arguments: Any) -> RankError:
    started = time.monotonic()
    with pytest.raises(RankError, match=says) as caught:
        ranks(world, function, *arguments, **TRAINER)
    assert "time limit" not in str(caught.value)
    assert time.monotonic() - started < 30
    return caught.value


def test_50_a_hook_that_calls_the_model_on_one_rank_is_an_error_that_says_what_to_call(ranks: RankPool) -> None:
    ends_at_once(ranks, 2, r"use trainer.validate, trainer.test or trainer.predict", _calls_itself)


class Speaking(TinyLM):
    """Logs what only the last stage reaches, and in another order on each rank."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        values = {"a": loss, "b": 2 * loss, "c": torch.tensor(5.0)}
        ordered = dict(reversed(values.items())) if self.global_rank else values
        self.log_dict(ordered, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    def on_train_epoch_start(self) -> None:
        self.log("epochs", float(self.current_epoch), on_epoch=True)


class Late(ModelCheckpoint):
    """Rank 1 comes to each save later than rank 0 has written its file."""

    def _save_topk_checkpoint(self, trainer: Any, monitor_candidates: Any) -> None:
        if trainer.global_rank == 1:
            time.sleep(0.2)
        super()._save_topk_checkpoint(trainer, monitor_candidates)


def _monitored(rank: int, folder: str, ranks: int) -> Any:
    callback = Late(folder, monitor="val_loss", save_top_k=2, filename="same-name")
    strategy: Any = {"strategy": FiveD(PipelineParallel(2, microbatches=2))} if ranks > 1 else {}
    trainer = quiet(devices=ranks, callbacks=[callback], enable_checkpointing=True, max_epochs=3, **strategy)
    module = Speaking()
    trainer.fit(module, loader(8, 4 // max(1, ranks // 2)), loader(4, 4 // max(1, ranks // 2)))
    metrics = plain(trainer.callback_metrics)
    trainer.strategy.barrier()
    (tested,) = trainer.test(module, loader(4), ckpt_path="best", verbose=False)
    (lr,) = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return metrics, lr, callback.best_model_path, sorted(path.name for path in Path(folder).iterdir()), tested


def test_58_59_61_what_only_last_stages_log_is_one_value_on_all_ranks_that_callbacks_agree_on(
    ranks: RankPool, tmp_path: Path
) -> None:
    metrics, lr, best, kept, tested = one_and_same(ranks(4, _monitored, str(tmp_path / "four"), 4, **TRAINER))
    alone = _monitored(0, str(tmp_path / "one"), 1)
    for key in ("val_loss", "a_epoch", "b_epoch", "c_epoch", "c_step", "epochs"):
        assert metrics[key] == pytest.approx(alone[0][key], rel=1e-5), key
    assert lr == alone[1]
    assert Path(best).name in kept
    assert kept == alone[3]
    assert tested == pytest.approx(alone[4], rel=1e-5)


class Silent(TinyLM):
    """At its third batch, some stage or microbatch has nothing to return."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx == 2 and self.how == "first stage" and self.global_rank == 0:
            return None
        loss = self.loss(batch)  # the end, on other stages than the last
        self.calls += 1
        if batch_idx != 2:
            return loss
        if self.how == "last stage" or (self.how == "one microbatch" and self.calls % 2 == 0):
            return None
        return torch.zeros(()) if self.how == "constant" else loss


def _silent(rank: int, how: str) -> None:
    quiet(strategy=FiveD(PipelineParallel(2, microbatches=2)), devices=2).fit(Silent(how), loader(10))


@pytest.mark.parametrize(
    ("how", "says", "rank"),
    [
        ("first stage", "training_step returned None on rank 0 of 2", 0),
        ("last stage", "training_step returned None on rank 1 of 2", 1),
        ("one microbatch", "training_step returned None on rank 1 of 2", 1),
        ("constant", "depends on no trained weight", 1),
    ],
)
def test_62_a_stage_without_a_loss_is_an_error_of_the_whole_job(
    ranks: RankPool, how: str, says: str, rank: int
) -> None:
    assert ends_at_once(ranks, 2, says, _silent, how).rank == rank


class Counted(L.LightningModule):
    """The loss of a row is the mean over the tokens that count, all of which have the row's number as their own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1, bias=False)
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        x = self.scale(batch[..., None].clamp(min=0.0))
        for layer in self.layers:
            x = layer(x)
        counts = batch >= 0
        loss = x[..., 0][counts].mean()
        return {"loss": loss, "weight": counts.sum()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


IGNORED = -1.0


def _counted(*data: list[list[float]], data_ranks: int = 1, data_rank: int = 0) -> Any:
    return DataLoader([torch.tensor(batch) for batch in data], batch_size=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe_v"])
def test_16_17_microbatches_count_by_their_tokens_and_those_without_any_count_for_nothing(
    ranks: RankPool, schedule: str
) -> None:
    one = [[4.0, IGNORED, IGNORED], [1.0, 1.0, 1.0]]
    other = [[IGNORED] * 3, [4.0, 4.0, 2.0]]
    chunks = PipelineParallel(
        2, schedule=schedule, microbatches=2, split=[1, 1] if schedule == "1f1b" else [0, 1, 1, 0]
    )
    found = ranks(2, _each, [(Counted, partial(_counted, one, other), chunks, {})], 2, 1, **TRAINER)
    for (each,) in found:
        assert each["losses"][0] == pytest.approx(1.75)
        assert each["gradients"][0]
        for gradient in each["gradients"][0].values():
            assert gradient.item() == pytest.approx(1.75)
        assert each["losses"][1] == pytest.approx(10 / 3 * (1 - 0.175) ** 3)


def _short_window(rank: int, ranks: int) -> Any:
    plugins = [PipelineParallel(2, microbatches=2)] if ranks > 1 else []
    data, data_ranks = partial(rows, 24, 4), max(1, ranks // 2)
    strategy = partial(FiveD, *plugins)
    return fit(rank, partial(TinyLM, layers=3), data, strategy, ranks, data_ranks, accumulate_grad_batches=4)


def test_19_the_last_short_window_is_divided_by_its_own_batches_beside_data_ranks(ranks: RankPool) -> None:
    (expected,) = ranks(1, _short_window, 1, **TRAINER)
    assert len(expected["gradients"]) == 2
    differences = worst(ranks(4, _short_window, 4, **TRAINER), expected)
    assert max(differences.values()) < 1e-5, differences


class Stepping(torch.autograd.Function):
    """A weight whose gradient is multiplied by a factor: infinity on one stage does not reach any other."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (factor,) = ctx.saved_tensors
        return gradient * factor.to(gradient.dtype), None


class Plus(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        return x + Stepping.apply(self.weight, factor)


class Sums(L.LightningModule):
    """A weight per stage; column 0 of a batch is the data, and each further one the gradient of a stage's weight."""

    def __init__(self, lr: float = 1.0, gamma: float = 0.5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Plus() for _ in range(2))
        self.lr, self.gamma = lr, gamma

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch[:, 0]
        for index, layer in enumerate(self.layers):
            x = layer(x, batch[0, 1 + index])
        return x.mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=self.gamma)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _sums(rank: int, cases: list[tuple[list[list[float]], Any]], arguments: dict[str, Any]) -> list[Any]:
    found = []
    for batches, precision in cases:
        record, module = Record(), Sums()
        data = torch.tensor(batches).repeat_interleave(2, 0)  # two rows, each a microbatch
        strategy = FiveD(PipelineParallel(2, microbatches=2), ZeRO(stage=1))
        plugins = [precision] if precision is not None else None
        arguments |= {"use_distributed_sampler": False}
        trainer = quiet(strategy=strategy, devices=2, callbacks=[record], plugins=plugins, **arguments)
        trainer.fit(module, DataLoader(data, batch_size=2))  # type: ignore[arg-type]
        weights = [float(value) for value in record.parameters.values()]
        gradients = [float(each) for step in record.gradients for each in step.values()]
        scaler = trainer.precision_plugin.scaler if precision is not None else None
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        skipped = trainer.strategy.skipped_steps.state_dict()
        found.append((weights, gradients, record.norms, lr, skipped, None if scaler is None else scaler.scale))
    return found


def test_02_every_stage_clips_by_the_norm_of_all(ranks: RankPool) -> None:
    (first,), (second,) = ranks(2, _sums, [([[1.0, 3.0, 4.0]], None)], {"gradient_clip_val": 1.0}, **TRAINER)
    assert first[2] == second[2] == [pytest.approx(5.0)]
    assert (first[1], second[1]) == ([3.0], [4.0])
    assert (first[0], second[0]) == ([pytest.approx(-0.6)], [pytest.approx(-0.8)])


@pytest.mark.parametrize("bad_stage", [0, 1])
def test_07_08_13_an_overflow_on_one_stage_skips_the_step_and_the_schedule_on_all(
    ranks: RankPool, bad_stage: int
) -> None:
    bad = [1.0, 1.0, 1.0]
    bad[1 + bad_stage] = float("inf")
    scaled = FiveDPrecision("16-mixed", loss_scaling=LossScaling(4.0))
    clipped = FiveDPrecision("16-mixed", loss_scaling=LossScaling(1024.0))
    cases = [([bad, bad, [1.0] * 3, [1.0] * 3], scaled), ([[1.0, 3.0, 4.0]], clipped)]
    found = ranks(2, _sums, cases, {"gradient_clip_val": 5.0}, **TRAINER)
    for (weights, _, norms, lr, skipped, scale), _ in found:
        assert weights == [pytest.approx(-1.5)]
        assert norms[2:] == [pytest.approx(2**0.5)] * 2
        assert skipped["by_reason"] == {"loss scale": 2}
        assert (lr, scale) == (0.25, 1.0)
    assert [each[1][1] for each in found] == [[3.0], [4.0]]  # unscaled once, and not clipped by a scaled norm
    assert [each[1][2] for each in found] == [[pytest.approx(5.0)]] * 2


def _mixed(rank: int, ranks: int, precision: str) -> Any:
    plugins = (PipelineParallel(2, microbatches=2), ZeRO(stage=1)) if ranks > 1 else (ZeRO(stage=0),)
    data_ranks = max(1, ranks // 2)
    data = partial(rows, 32, 8)
    arguments = {"plugins": FiveDPrecision(precision), "gradient_clip_val": 0.5}
    return fit(rank, partial(TinyLM, layers=3), data, partial(FiveD, *plugins), ranks, data_ranks, **arguments)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_half_precision_on_stages_with_data_ranks_is_that_of_one_process(ranks: RankPool, precision: str) -> None:
    (expected,) = ranks(1, _mixed, 1, precision, **TRAINER)
    differences = worst(ranks(4, _mixed, 4, precision, **TRAINER), expected)
    # Rounded to 8 and 11 bits, in sums of other lengths.
    assert max(differences.values()) < (0.06 if precision == "bf16-mixed" else 0.01), differences


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(64, 64), nn.Dropout(0.5)
        self.masks: list[tuple[bool, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.masks += map(tuple, (self.dropout(torch.ones_like(x)) > 0).tolist())
        return x + self.dropout(torch.tanh(self.linear(x)))


class Dropped(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Dropping() for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _numbers(data_ranks: int = 1, data_rank: int = 0) -> Any:
    return DataLoader(torch.ones(8 // data_ranks, 64), batch_size=4 // data_ranks)  # type: ignore[arg-type]


def _dropped(rank: int) -> Any:
    found = []
    for options in ({}, {"activation_checkpointing": "full"}):
        module = Dropped()
        strategy = partial(FiveD, PipelineParallel(2, microbatches=2), ZeRO(stage=0), **options)
        run = fit(rank, lambda module=module: module, _numbers, strategy, 4, 2)
        found.append((run, [mask for layer in module.layers for mask in getattr(layer, "masks", [])]))
    return found


def test_31_32_every_stage_microbatch_step_and_data_rank_drops_its_own_and_recomputation_drops_the_same(
    ranks: RankPool,
) -> None:
    found = ranks(4, _dropped, **TRAINER)
    masks = [mask for (_, drawn), _ in found for mask in drawn]
    assert len(masks) == len(set(masks)) == 4 * 2 * 4  # layers, batches, rows of all data ranks
    for (plain_run, _), (recomputed, _) in found:
        assert recomputed["losses"] == pytest.approx(plain_run["losses"], rel=1e-6)
        for step, gradients in enumerate(plain_run["gradients"]):
            for name, gradient in gradients.items():
                torch.testing.assert_close(recomputed["gradients"][step][name], gradient, rtol=1e-6, atol=1e-7)
    for one, other in ((0, 1), (2, 3)):  # replicas of one stage
        weights, same = found[one][0][0]["parameters"], found[other][0][0]["parameters"]
        assert weights.keys() == same.keys()
        assert all(torch.equal(weights[name], same[name]) for name in weights)


class Seen(L.Callback):
    """The samples of each epoch, and what a worker's random numbers made of them."""

    def __init__(self) -> None:
        self.samples: list[list[int]] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.samples.append([])

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Tensor, batch_idx: int) -> None:
        self.samples[-1] += [int(row[0, 0]) for row in batch]


class Sixteen(Dataset[Tensor]):
    """Sixteen rows, all of whose tokens are the row's number, of two things of that kind."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        noise = torch.rand(())  # of the worker, where there is one
        return torch.stack([torch.full((7,), float(index)), noise.expand(7)])


class Looking(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _samples(rank: int) -> list[list[list[int]]]:
    found = []
    for workers in (0, 2):
        seen = Seen()
        trainer = quiet(strategy=FiveD(PipelineParallel(2, microbatches=2)), devices=4, callbacks=[seen], max_epochs=2)
        trainer.fit(Looking(), DataLoader(Sixteen(), batch_size=4, shuffle=True, num_workers=workers))
        found.append(seen.samples)
    return found


def test_76_stages_of_a_pipeline_read_the_same_samples_and_pipelines_different_ones(ranks: RankPool) -> None:
    found = ranks(4, _samples, **TRAINER)
    assert found[0] == found[2]  # the stages of one data rank
    assert found[1] == found[3]
    for one, other in zip(found[0], found[1], strict=True):
        for epoch in range(2):
            assert sorted(one[epoch] + other[epoch]) == list(range(16))
        assert one[0] != one[1]


def _fifty(rank: int) -> list[list[float]]:
    batch = Tokens(8).rows
    losses = []
    for schedule, chunks in (("1f1b", None), ("interleaved_1f1b", 2)):
        record = Record()
        strategy = FiveD(PipelineParallel(4, schedule=schedule, chunks=chunks, microbatches=8))
        trainer = quiet(strategy=strategy, devices=4, callbacks=[record])
        trainer.fit(TinyLM(layers=9, lr=0.0), DataLoader([batch] * 50, batch_size=None))  # type: ignore[arg-type]
        losses.append(record.losses)
    return losses


def test_91_fifty_steps_on_busy_cores_end_and_each_has_the_same_loss(ranks: RankPool) -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for found in ranks(4, _fifty, **TRAINER):
            for losses in found:
                assert len(losses) == 50
                assert set(losses) == {losses[0]}
    finally:
        for process in busy:
            process.kill()
            process.wait()

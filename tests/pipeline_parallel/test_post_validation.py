"""Optimizer steps that do not wait for other stages end with the bits of those that do."""

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torchmetrics import SumMetric

from lightning_5d import FiveD, FiveDPrecision, LossScaling, PipelineParallel, ZeRO
from lightning_5d.pipeline_parallel import SCHEDULES, make_schedule
from lightning_5d.pipeline_parallel.program import program_of
from tests.modules import Block, TinyLM
from tests.pipeline_parallel.recorded import rows
from tests.pipeline_parallel.timed_steps import fit_timed
from tests.ranks.pool import RankError, RankPool
from tests.trainers import quiet

SEPARATE: dict[str, Any] = {"backend": None, "timeout": 60.0}
STEPS = 6


class _Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return weight * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class Moody(Block):
    """A block with a running mean, whose gain has gradients times `factor` in the step of its `trouble`."""

    step = 0

    def __init__(self, width: int, trouble: dict[int, float]) -> None:
        super().__init__(width)
        self.gain = nn.Parameter(torch.ones(width))
        self.trouble = trouble
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().float().mean((0, 1)), 0.1)
            self.count = self.count + 1
        x = super().forward(x)
        return x * _Poison.apply(self.gain, self.trouble.get(Moody.step, 1.0))


class Model(TinyLM):
    """`trouble[layer][step]` multiplies a gradient."""

    def __init__(
        self, layers: int = 4, trouble: dict[int, dict[int, float]] | None = None, momentum: bool = False
    ) -> None:
        super().__init__(layers)
        self.layers = nn.ModuleList(Moody(8, (trouble or {}).get(i, {})) for i in range(layers))
        self.momentum = momentum
        self.seen = SumMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        Moody.step = self.trainer.global_step
        self.seen.update(batch.sum())
        self.log("seen", self.seen, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        if self.momentum:
            optimizer: Any = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Watch(L.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.seen.append((float(outputs["loss"]), float(trainer.callback_metrics["train_loss_step"])))


def _fit(rank: int, module: Any, pipeline: Any, ranks: int, stage: int, data_ranks: int = 1, **arguments: Any) -> Any:
    watch = Watch()
    scaling = arguments.pop("scaling", None)
    if scaling is not None:
        arguments["plugins"] = FiveDPrecision("16-mixed", loss_scaling=scaling)
    callbacks = [watch, *(make() for make in arguments.pop("callbacks", ()))]
    strategy = FiveD(pipeline, ZeRO(stage=stage))
    trainer = quiet(strategy=strategy, devices=ranks, callbacks=callbacks, use_distributed_sampler=False, **arguments)
    model = module()
    data = rows(8 * STEPS, 8, data_ranks, rank % data_ranks)
    trainer.fit(model, data, data if "limit_val_batches" in arguments else None)
    local = lambda t: (t.to_local() if hasattr(t, "to_local") else t).detach().clone()  # noqa: E731
    optimizer = trainer.optimizers[0]
    found = {f"weight {name}": local(p) for name, p in model.named_parameters()}
    found |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    for i, entry in enumerate(optimizer.state.values()):
        found |= {f"state {i} {key}": local(value) for key, value in entry.items() if isinstance(value, Tensor)}
    return {
        "tensors": found,
        "seen": watch.seen,
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "lr": optimizer.param_groups[0]["lr"],
        "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "skipped": strategy.skipped_steps.state_dict(),
        "scaler": trainer.precision_plugin.scaler and trainer.precision_plugin.scaler.state_dict(),
        "redone": strategy._post.steps_redone if strategy._post is not None else None,
    }


def _same(
    ranks: RankPool,
    module: Any,
    size: int = 2,
    data_ranks: int = 1,
    stage: int = 0,
    name: str = "zb_h1",
    **arguments: Any,
) -> int:
    """Trains with and without; returns how many steps were made again."""
    both = []
    for late in (False, True):
        pipeline = PipelineParallel(size, schedule=name, microbatches=4, post_validation=late)
        call = partial(_fit, module=module, pipeline=pipeline, ranks=size * data_ranks, stage=stage)
        both.append(ranks(size * data_ranks, partial(call, data_ranks=data_ranks, **arguments), **SEPARATE))
    for waiting, late in zip(*both, strict=True):
        assert waiting["tensors"].keys() == late["tensors"].keys()
        wrong = [
            n
            for n, t in waiting["tensors"].items()
            if not torch.equal(t.nan_to_num(7e7), late["tensors"][n].nan_to_num(7e7))
        ]
        assert not wrong, wrong
        for key in ("seen", "metrics", "lr", "schedule", "skipped", "scaler"):
            assert str(waiting[key]) == str(late[key]), key
    (redone,) = {late["redone"] for late in both[1]}
    return redone


@pytest.mark.parametrize("name", ["zb_h1", "zb_v", "v_half", "v_min", "dualpipe_v"])
def test_clipping_on_some_steps(ranks: RankPool, name: str) -> None:
    module = partial(Model, trouble={0: {1: 300.0, 4: 300.0}, 3: {2: 300.0}})
    assert _same(ranks, module, name=name, gradient_clip_val=5.0) == 3


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_with_data_ranks_at_every_stage_of_zero(ranks: RankPool, stage: int, precision: Any) -> None:
    module = partial(Model, trouble={0: {1: 300.0}, 3: {3: 300.0}}, momentum=precision == "32-true")
    redone = _same(ranks, module, data_ranks=2, stage=stage, name="zb_h2", gradient_clip_val=5.0, precision=precision)
    assert redone == 2


@pytest.mark.parametrize("layer", [0, 2])
def test_an_overflow_on_one_stage_leaves_the_step_out_on_all(ranks: RankPool, layer: int) -> None:
    module = partial(Model, trouble={layer: {0: torch.inf, 2: torch.nan, 3: 30.0}})
    scaling = LossScaling(init_scale=256.0, growth_interval=2)
    redone = _same(ranks, module, data_ranks=2, stage=2, name="zb_v", scaling=scaling, gradient_clip_val=0.5)
    assert redone == STEPS - 1  # clipping at 0.5 is needed wherever there is no overflow


def test_gradients_that_are_not_finite_make_nan_of_all_weights_as_ever(ranks: RankPool) -> None:
    assert _same(ranks, partial(Model, trouble={3: {3: torch.inf}}), gradient_clip_val=100.0) == 2


def test_four_ranks_and_accumulation(ranks: RankPool) -> None:
    module = partial(Model, layers=9, trouble={4: {1: 300.0}})
    for name in ("zb_v", "zb_h2"):
        assert _same(ranks, module, size=4, name=name, gradient_clip_val=5.0, accumulate_grad_batches=2) == 1


class Looks(L.Callback):
    """Reads weights after each step, having asked for final ones."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        trainer.strategy.settle_step()  # type: ignore[attr-defined]
        module.log("weight", sum(p.double().sum() for p in module.parameters() if p.numel()), on_step=True)  # type: ignore[arg-type]


class Saves(L.Callback):
    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if index == 1:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/at_1.ckpt")
        trainer.should_stop |= index == 3


_TROUBLE: Any = {0: {1: 300.0}, 3: {3: 300.0}}


def test_a_hook_can_ask_for_final_weights(ranks: RankPool) -> None:
    assert _same(ranks, partial(Model, trouble=_TROUBLE), gradient_clip_val=5.0, callbacks=[Looks]) == 2


def test_evaluation_and_the_end_of_training_see_final_weights(ranks: RankPool, tmp_path: Any) -> None:
    module = partial(Model, trouble=_TROUBLE)
    for options in ({"val_check_interval": 2}, {"max_steps": 4}, {"callbacks": [Saves]}):
        found = _same(
            ranks,
            module,
            name="zb_v",
            gradient_clip_val=5.0,
            limit_val_batches=1,
            default_root_dir=str(tmp_path),
            **options,
        )
        assert found == (0 if "val_check_interval" in options else 1 + ("callbacks" in options))


def _checkpoint(rank: int, folder: str, late: bool) -> Any:
    pipeline = PipelineParallel(2, schedule="zb_h1", microbatches=4, post_validation=late)
    found = _fit(
        rank,
        partial(Model, trouble=_TROUBLE),
        pipeline,
        2,
        0,
        gradient_clip_val=5.0,
        callbacks=[Saves],
        default_root_dir=folder,
    )
    return found["redone"]


def test_checkpoints_hold_final_weights(ranks: RankPool, tmp_path: Any) -> None:
    for late in (False, True):
        ranks(2, _checkpoint, str(tmp_path / str(late)), late, **SEPARATE)
    one, other = (torch.load(tmp_path / str(late) / "at_1.ckpt", weights_only=False) for late in (False, True))
    assert all(torch.equal(one["state_dict"][name], tensor) for name, tensor in other["state_dict"].items())
    for mine, theirs in zip(
        one["optimizer_states"][0]["state"].values(), other["optimizer_states"][0]["state"].values(), strict=True
    ):
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


class LogsOnOneStage(L.Callback):
    def __init__(self) -> None:
        self.seen: list[float | None] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        if trainer.global_rank == 0 and index >= 3:
            module.log("odd", float(index), on_step=True, sync_dist=True)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        value = trainer.callback_metrics.get("odd")
        self.seen.append(None if value is None else float(value))


def _odd(rank: int) -> list[float | None]:
    log = LogsOnOneStage()
    pipeline = PipelineParallel(2, schedule="zb_h1", microbatches=4, post_validation=True)
    trainer = quiet(strategy=FiveD(pipeline), devices=2, gradient_clip_val=5.0, callbacks=[log])
    trainer.fit(Model(), rows(8 * STEPS + 8, 8))
    return log.seen


def test_a_key_of_one_stage_reaches_the_others_a_step_late_and_then_in_time(ranks: RankPool) -> None:
    seen = ranks(2, _odd, **SEPARATE)[1]
    assert seen == [None, None, None, None, 4.0, 5.0, 6.0]


class Norms(L.Callback):
    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        module.log("norm", trainer.strategy.gradient_norm())  # type: ignore[attr-defined]


def test_hooks_that_look_at_gradients_make_steps_wait(ranks: RankPool) -> None:
    assert _same(ranks, partial(Model, trouble=_TROUBLE), gradient_clip_val=5.0, callbacks=[Norms]) == 0


def _timed(ranks: RankPool, seconds: float) -> tuple[dict[bool, float], dict[bool, float]]:
    """Seconds of a step, and how much later the last rank ends one than the first, with steps that wait and late verdicts."""
    steps, apart = {}, {}
    for late in (False, True):
        call = partial(fit_timed, schedule="zb_h2", late=late, ranks=4, microbatches=8, seconds=seconds, steps=12)
        times = torch.tensor(ranks(4, call, **SEPARATE), dtype=torch.float64)
        steps[late] = float(times.diff()[:, 4:-1].median(1).values.mean())
        apart[late] = float((times[3] - times[0])[4:-1].median())
    return steps, apart


@pytest.mark.alone
def test_steps_have_no_bubble_between_them(ranks: RankPool) -> None:
    seconds, seen = 0.006, []
    for _ in range(10):  # another load on the machine may disturb a measurement, and not all of them
        steps, apart = _timed(ranks, seconds)
        seen.append((steps, apart))
        # The last rank ends three forwards after the first, where nobody waits.
        if steps[True] < steps[False] - seconds and apart[True] > 2 * seconds > apart[False]:
            return
    pytest.fail(f"steps that need not wait are not shorter: {seen}")


class Fails(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        if index == 2:
            raise ZeroDivisionError("on purpose")


def _fails(rank: int) -> str:
    pipeline = PipelineParallel(2, schedule="zb_h1", microbatches=4, post_validation=True)
    trainer = quiet(strategy=FiveD(pipeline), devices=2, gradient_clip_val=5.0, callbacks=[Fails()])
    trainer.fit(Model(trouble=_TROUBLE), rows(8 * STEPS, 8))
    return "ended"


def test_an_exception_does_not_wait_for_a_verdict(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="on purpose") as caught:
        ranks(2, _fails, **SEPARATE)
    assert isinstance(caught.value.cause, ZeroDivisionError)


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "dualpipe"])
def test_other_schedules_are_refused(name: str) -> None:
    chunks = {"chunks": 2} if SCHEDULES[name].chunks is None else {}
    with pytest.raises(MisconfigurationException, match="Use zb_h1, zb_h2, zb_v, v_half, v_min or dualpipe_v, or"):
        quiet(strategy=FiveD(PipelineParallel(2, schedule=name, post_validation=True, **chunks)), devices=2)


@pytest.mark.parametrize("name", [n for n, f in SCHEDULES.items() if f.copies == 1])
def test_nothing_is_taken_before_a_verdict_that_may_be_sent_after_it(name: str) -> None:
    for ranks, microbatches in ((2, 2), (4, 8), (4, 3), (8, 12)):
        if SCHEDULES[name].chunks is None:
            continue
        schedule = make_schedule(name, ranks, microbatches)
        programs = [program_of(schedule, rank, microbatches, True) for rank in range(ranks)]
        for program in programs:
            assert all(step.action.kind.value == "F" for step in program.steps[: program.settles])
            for sender, early in program.early.items():
                taken = {
                    (s.action.stage, s.action.microbatch)
                    for s in program.steps[: program.settles]
                    if s.source == sender
                }
                sent = [m for m in program.incoming[sender][:early] if not m.gradient]
                assert len(sent) == early
                assert taken <= {(m.stage, m.microbatch) for m in sent}

"""Layers with experts in stages of a pipeline: every schedule, with balance losses of all stages."""

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_5d import ExpertParallel, FiveD, FiveDPrecision, LossScaling, PipelineParallel, ZeRO
from lightning_5d.callbacks.expert_load import ExpertLoad
from lightning_5d.feed_forward import Projection
from lightning_5d.models import LanguageModel
from lightning_5d.pipeline_parallel import SCHEDULES, make_schedule
from lightning_5d.pipeline_parallel.table import write_schedule
from tests.expert_parallel.in_stages import compare_settings, sparse
from tests.expert_parallel.test_training import mixture
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, Dealt, Rows, compare
from tests.trainers import quiet

MICROBATCHES = 4


def _strategy(name: str, *others: Any, **options: Any) -> Any:
    chunks: dict[str, Any] = {"chunks": 2} if SCHEDULES.get(name) and SCHEDULES[name].chunks is None else {}
    pipeline = PipelineParallel(2, schedule=name, microbatches=MICROBATCHES, **chunks, **options)
    return partial(FiveD, pipeline, ExpertParallel(2), *others)


def test_every_schedule_carries_balance_losses_and_gradients_of_routers(ranks: RankPool) -> None:
    names = [name for name in SCHEDULES if name != "dualpipe"]
    strategies = {name: _strategy(name, ZeRO(stage=index % 4)) for index, name in enumerate(names)}
    compare_settings(ranks, 4, sparse(), strategies, microbatches=MICROBATCHES)


def test_ranks_that_hold_a_stage_twice_count_together(ranks: RankPool, tmp_path: Path) -> None:
    # Each direction has a part of the microbatches: the choices so far in a step are those of a direction, and in one process of all.
    table = tmp_path / "both_ways.csv"
    write_schedule(make_schedule("dualpipe", 2, MICROBATCHES), table)
    strategies = {"name": _strategy("dualpipe", ZeRO(stage=1)), "table": _strategy(str(table), ZeRO(stage=2))}
    compare_settings(ranks, 4, sparse(balance_scope="sequence"), strategies, microbatches=MICROBATCHES)


def _sharing() -> LanguageModel:
    module = mixture(balance=0.0, z=0.0)()
    first, second = module.decoder.layers
    second.mlp.experts = first.mlp.experts
    return module


def test_layers_in_two_stages_may_share_their_experts(ranks: RankPool) -> None:
    compare(ranks, _sharing, PipelineParallel(2, microbatches=2), ExpertParallel(2), world=4)


class _Kept(L.Callback):
    """Which of some weights are still there while others train."""

    def __init__(self, module: nn.Module) -> None:
        self.weights = {name: weakref.ref(p) for name, p in module.named_parameters() if ".experts." in name}
        self.found: list[str] = []

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        gc.collect()
        self.found = [name for name, weight in self.weights.items() if weight() is not None]


def _kept(rank: int, plugins: tuple[Any, ...]) -> list[str]:
    module = mixture()()
    kept = _Kept(module)
    settings: dict[str, Any] = {"devices": 4, "max_steps": 1, "callbacks": [kept], "use_distributed_sampler": False}
    trainer = quiet(strategy=FiveD(PipelineParallel(2, microbatches=2), *plugins), **settings)
    trainer.fit(module, datamodule=Dealt(Rows(8, 6), 4))
    return kept.found


@pytest.mark.parametrize("plugins", [(ExpertParallel(2),), ()], ids=["spread", "whole"])
def test_a_rank_keeps_nothing_of_experts_of_other_stages(ranks: RankPool, plugins: tuple[Any, ...]) -> None:
    for rank, found in enumerate(ranks(4, _kept, plugins, **SEPARATE)):
        other = f"decoder.layers.{1 - rank // 2}."
        assert not [name for name in found if name.startswith(other)]


class Unequal(Dealt):
    """Two data ranks have batches of 4 and of 3 rows; one process has all of them, in turn."""

    def train_dataloader(self) -> DataLoader[Any]:
        strategy = self.trainer.strategy  # type: ignore[union-attr]
        batches = [range(4), range(4, 7), range(7, 11), range(11, 14)]
        if isinstance(strategy, FiveD):
            batches = batches[strategy.distributed_sampler_kwargs["rank"] :: 2]
        return DataLoader(self.rows, batch_sampler=batches)

    val_dataloader = train_dataloader


def test_data_ranks_with_batches_of_other_sizes_have_as_many_microbatches(ranks: RankPool) -> None:
    strategies = {name: _strategy(name) for name in ("1f1b", "zb_v")}
    data = partial(Unequal, Rows(14, 6), 0)
    compare_settings(ranks, 4, sparse(balance=0.0), strategies, microbatches=2, data=data)


class Overflowing(Projection):
    """An output layer whose weight has an infinite gradient in one step; what comes before it has its own."""

    step = -1

    def forward(self, x: Tensor) -> Tensor:
        factor = float("inf") if Overflowing.step == 1 else 1.0
        return F.linear(x, Scaled.apply(self.weight, factor))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return weight * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class Counting(L.Callback):
    leaves_gradients_alone = True

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        Overflowing.step = index


def _post_validated(rank: int, post_validation: bool, bound: float, overflow: bool, folder: Path) -> dict[str, Any]:
    strategy = _strategy("zb_h1", ZeRO(stage=1), post_validation=post_validation)()
    loads = ExpertLoad(chart=False, dirpath=folder)
    precision = FiveDPrecision("16-mixed", loss_scaling=LossScaling(init_scale=2.0**8)) if overflow else None
    trainer = quiet(
        strategy=strategy,
        devices=4,
        use_distributed_sampler=False,
        gradient_clip_val=bound,
        callbacks=[loads, Counting()],
        plugins=precision,
    )
    module = sparse()()
    if overflow:
        module.decoder.lm_head.__class__ = Overflowing
    trainer.fit(module, datamodule=Dealt(Rows(64, 6), 16))
    return {
        "tensors": {name: getattr(t, "_local_tensor", t).clone() for name, t in module.state_dict().items()},
        "loads": [
            {name: load.tokens_E.tolist() for name, load in each.loads.items()} for each in loads.history.columns
        ],
        "redone": strategy._post.steps_redone if strategy._post is not None else 0,
        "skipped": strategy.skipped_steps.state_dict(),
    }


@pytest.mark.parametrize(
    ("bound", "overflow", "redone"), [(0.5, False, 3), (1e3, True, 1)], ids=["clipped", "left out"]
)
def test_biases_and_loads_are_those_of_steps_that_wait(
    ranks: RankPool, tmp_path: Path, bound: float, overflow: bool, redone: int
) -> None:
    call = partial(_post_validated, bound=bound, overflow=overflow, folder=tmp_path)
    waiting, optimistic = (ranks(4, partial(call, post_validation=each), **SEPARATE) for each in (False, True))
    for one, other in zip(waiting, optimistic, strict=True):
        assert other["redone"] == redone
        assert one["tensors"].keys() == other["tensors"].keys()
        assert all(torch.equal(one["tensors"][name], other["tensors"][name]) for name in one["tensors"])
        assert one["loads"] == other["loads"]
        assert len(one["loads"]) == 4
        assert one["skipped"] == other["skipped"]

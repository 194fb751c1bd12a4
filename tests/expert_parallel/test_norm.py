"""One gradient norm over ranks that hold different experts, and one decision about overflow."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lightning_5d import ExpertParallel, FiveD, FiveDPrecision, LossScaling, ZeRO
from lightning_5d.data_parallel import ShardOptions, shard
from lightning_5d.data_parallel.sharded import ShardedData
from lightning_5d.expert_parallel.found import FoundExperts
from lightning_5d.expert_parallel.placement import ExpertWeights
from lightning_5d.gradients import clip_by_norm, global_norm
from lightning_5d.models import LanguageModel
from tests.data_parallel.training import inputs
from tests.expert_parallel.mixture import Mixture, mesh_of, placed, whole
from tests.expert_parallel.test_training import mixture
from tests.tensor_parallel.parity import Dealt, Rows
from tests.trainers import quiet


class _Two(nn.Module):
    """An expert for each of two ranks, and a dense weight, whose gradients are what is given times the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.weight = nn.Parameter(torch.zeros(2, 4))
        self.dense = nn.Linear(3, 1, bias=False)
        self.trained = True

    def forward(self, factor: float) -> Tensor:
        loss = self.dense.weight.sum() * 3.0**0.5
        # Not through its own call, as hooks of a module without forward do not run: the root's gather is enough at stage 1.
        return loss + self.experts.weight.sum() * factor if self.trained else loss


def _trap_04(rank: int, frozen: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    module = _Two()
    module.trained = not frozen
    module.experts.requires_grad_(not frozen)
    mesh = mesh_of((1, 1, 2, 1, 1))
    view = mesh.expert_view(2)
    weights = ExpertWeights([FoundExperts("experts", module.experts, 2, None, ("weight",), _unused)], view, mesh)
    engine = shard(module, [], mesh.shard_mesh, ShardOptions(1), [view])
    engine.begin()
    # One expert has a gradient of norm 40, the other one of 4: each is a sum over the tokens of both ranks, to be halved.
    module(2 * (20.0 if rank == 0 else 2.0)).backward()
    engine.wait()
    parameters = list(module.parameters())
    before = {name: p.grad.to_local().clone() for name, p in module.named_parameters() if p.grad is not None}
    norm = global_norm(parameters, mesh, 2.0, weights.gradient_axes)
    clip_by_norm(parameters, 1.0, norm)
    factors = {
        name: (p.grad.to_local() / before[name]).unique().tolist()
        for name, p in module.named_parameters()
        if p.grad is not None and before[name].numel()
    }
    engine.close()
    return {"norm": float(norm), "factors": factors}


def _unused(*args: Any) -> Any:
    raise NotImplementedError


@pytest.mark.parametrize("frozen", [False, True])
def test_04_ranks_with_different_experts_have_one_norm_and_scale_alike(ranks, frozen):
    right = 3.0 if frozen else (40.0**2 + 4.0**2 + 3.0**2) ** 0.5
    for found in ranks(2, _trap_04, frozen, timeout=20):
        assert found["norm"] == pytest.approx(right, rel=1e-6)
        for factors in found["factors"].values():
            assert factors == [pytest.approx(1 / right, rel=1e-5)]


class _Rooted(Mixture):
    """With a weight of the root's own, so that parameters are whole again after a backward inside a step."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(5))
        self.automatic_optimization = False

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        return super().forward(x + self.shift, rank)


def _norms(rank: int, layouts: Sequence[tuple[int, int, tuple[int, ...]]]) -> list[tuple[float, float, float]]:
    return [_norms_of(rank, *layout) for layout in layouts]


def _norms_of(rank: int, stage: int, ep: int, sizes: Sequence[int]) -> tuple[float, float, float]:
    torch.manual_seed(0)
    module = _Rooted()
    mesh = mesh_of(sizes)
    view = mesh.expert_view(ep)
    weights = placed(module, mesh, view)
    options = ShardOptions(stage, synchronize=False)
    data = ShardedData(module, module.parallel_blocks(), mesh.shard_mesh, options, [view])

    def norm() -> float:
        return float(global_norm(module.parameters(), mesh, 2.0, weights.gradient_axes))

    def step() -> tuple[float, int]:
        # Ranks of one tensor line have the same batch.
        loss = F.softplus(module(inputs(0, 0, mesh.rank("dp_replicate", "dp_shard", "cp")))).mean()
        data.before_backward(loss).backward()
        data.after_backward()
        return norm(), sum(parameter.grad is not None for parameter in module.parameters())

    data.begin_microbatch(last=True)
    inside, shown = data.call(step, (), {})
    grads = {name: whole(parameter.grad) for name, parameter in module.named_parameters()}
    right = float(torch.stack([grad.double().pow(2).sum() for grad in grads.values()]).sum().sqrt())
    if stage < 3:
        assert shown == len(grads)
    at_rest = norm()
    data.close()
    return inside, at_rest, right


LAYOUTS = [
    *((stage, 2, (1, 1, 4, 1, 1)) for stage in range(4)),
    *((stage, 2, (1, 1, 2, 1, 2)) for stage in (0, 2, 3)),  # tensor ranks hold different experts
    *((stage, 2, (1, 2, 2, 1, 1)) for stage in (0, 1)),
    (2, 4, (1, 1, 2, 2, 1)),
]


def test_the_norm_counts_every_expert_once_at_rest_and_inside_a_step(ranks):
    for found in ranks(4, _norms, LAYOUTS, timeout=45):
        for layout, (inside, at_rest, right) in zip(LAYOUTS, found, strict=True):
            assert at_rest == pytest.approx(right, rel=1e-6), layout
            assert inside == pytest.approx(right, rel=1e-6), layout


class _Burst(L.Callback):
    """Makes a gradient of one expert of one rank infinite in the second step, before it is checked."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.seen: list[tuple[float, bool, bool]] = []
        self._before: list[Tensor] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self._before = [local(parameter).clone() for parameter in module.parameters()]

    def on_after_backward(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_rank == self.rank and trainer.fit_loop.batch_idx == 1:
            expert = next(p for name, p in module.named_parameters() if "experts.gate_up_proj" in name)
            expert.grad.to_local()[-1, 0, 0] = float("inf")

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        strategy: Any = trainer.strategy
        moved = [not torch.equal(local(p), old) for p, old in zip(module.parameters(), self._before, strict=True)]
        self.seen.append((trainer.precision_plugin.scaler.scale, strategy.overflow, any(moved)))


def local(parameter: Tensor) -> Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def _overflow(rank: int, make: Callable[[], LanguageModel], stage: int) -> Any:
    burst = _Burst(rank=1)
    trainer = quiet(
        strategy=FiveD(ExpertParallel(2), ZeRO(stage=stage)),
        devices=2,
        plugins=FiveDPrecision("16-mixed", loss_scaling=LossScaling(init_scale=4.0)),
        callbacks=[burst],
        use_distributed_sampler=False,
    )
    trainer.fit(make(), datamodule=Dealt(Rows(12, 6), 4))
    return burst.seen


@pytest.mark.parametrize("stage", [0, 3])
def test_07_an_overflow_in_one_expert_on_one_rank_skips_the_step_on_all(ranks, stage):
    for seen in ranks(2, _overflow, mixture(), stage, backend=None, timeout=60):
        assert seen == [(4.0, False, True), (2.0, True, False), (2.0, False, True)]

"""Gradients that each rank of the tensor axis has a summand of are complete wherever they are read."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_5d import FiveD, PipelineParallel, ZeRO
from lightning_5d.verify import verify
from tests.modules import Tokens, batches
from tests.pipeline_parallel.recorded import rows
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parted import Parted, Parts
from tests.trainers import quiet

TRAINER: dict[str, Any] = {"backend": None, "timeout": 60}

CASES: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "tp2-stage0": (2, 2, {"stage": 0}, {}),
    "tp4-copies": (4, 4, {"stage": 0}, {}),
    "dp2-stage0": (4, 2, {"stage": 0}, {}),
    "dp2-stage1": (4, 2, {"stage": 1}, {"accumulate_grad_batches": 2}),
    "dp2-stage2-offload": (4, 2, {"stage": 2, "offload": "cpu"}, {"accumulate_grad_batches": 2}),
    "dp2-stage3": (4, 2, {"stage": 3}, {"accumulate_grad_batches": 2}),
    "dp2-hybrid": (4, 2, {"stage": 1, "replicate": 2}, {}),
    "dp2-mixed-stage0": (4, 2, {"stage": 0}, {"precision": "bf16-mixed", "tolerance": 0.2}),
    "tp2-16-mixed": (2, 2, {"stage": 1}, {"precision": "16-mixed", "tolerance": 0.02}),
    "tp2-bf16-true": (2, 2, {"stage": 1}, {"precision": "bf16-true", "tolerance": 0.2}),
}


def _verified(rank: int, name: str) -> Any:
    devices, tp, data, arguments = CASES[name]
    strategy = FiveD(Parts(tp), ZeRO(**data))
    return verify(Parted(seed=5), batches(8), strategy, devices=devices, gradient_clip_val=0.5, **arguments)


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_norms_and_weights_are_those_of_one_process(ranks: RankPool, name: str) -> None:
    for parity in ranks(CASES[name][0], _verified, name, **TRAINER):
        assert parity.passed, parity.table()


class Kept(Parted):
    """Clears its gradients every second step only; hooks write down what they read."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.seen: list[dict[str, Tensor]] = []

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()

    def on_after_backward(self) -> None:
        if not self.trainer.fit_loop._should_accumulate():  # in the middle of a window gradients are not for reading
            self._note("layers.")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._note("")

    def _note(self, among: str) -> None:
        named = ((name, p) for name, p in self.named_parameters() if name.startswith(among))
        grads = {name: p.grad for name, p in named if p.grad is not None}
        strategy = self.trainer.strategy
        if isinstance(strategy, FiveD):
            grads = strategy.by_parameter(grads)
        self.seen.append({name: grad.detach().clone() for name, grad in grads.items()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _seen(rank: int, plugins: Any, devices: int, data_ranks: int, arguments: dict[str, Any]) -> Any:
    trainer = quiet(strategy=FiveD(*plugins), devices=devices, use_distributed_sampler=False, **arguments)
    module = Kept(layers=2)
    trainer.fit(module, rows(16, 4, data_ranks, rank // 2 % data_ranks))
    return module.seen if rank == 0 else None


def _alone(arguments: dict[str, Any]) -> list[dict[str, Tensor]]:
    trainer = quiet(devices=1, **arguments)
    module = Kept(layers=2)
    trainer.fit(module, rows(16, 4))
    return module.seen


LAYOUTS: dict[str, tuple[Any, int, int]] = {
    "tp2": ((Parts(2), ZeRO(stage=0)), 2, 1),
    "tp4": ((Parts(4), ZeRO(stage=0)), 4, 1),
    "tp2-dp2-stage2": ((Parts(2), ZeRO(stage=2)), 4, 2),
    "pp2-tp2-stage1": ((Parts(2), PipelineParallel(2, microbatches=2), ZeRO(stage=1)), 4, 1),
    "pp2-tp2-dp2": ((Parts(2), PipelineParallel(2, microbatches=2), ZeRO(stage=2, per_microbatch=True)), 8, 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_hooks_read_complete_gradients_also_those_nobody_has_cleared(ranks: RankPool, name: str) -> None:
    plugins, devices, data_ranks = LAYOUTS[name]
    for arguments in [{"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {"accumulate_grad_batches": 2}]:
        found = ranks(devices, _seen, plugins, devices, data_ranks, arguments, **TRAINER)[0]
        expected = _alone(arguments)
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


class ByHand(Parted):
    """Two backwards, clipping and a change of gradients inside of a manual step."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.automatic_optimization = False
        self.norms: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.manual_backward(super().training_step(batch.flip(0)[:1], batch_idx) / 2)
        for parameter in self.layers[0].parameters():
            parameter.grad.mul_(0.5)
        strategy = self.trainer.strategy
        if isinstance(strategy, FiveD):
            self.norms.append(float(strategy.gradient_norm(self.parameters())))
        else:
            self.norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])))
        self.clip_gradients(optimizer, 0.3, "norm")
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _by_hand(rank: int, tp: int, stage: int, devices: int) -> Any:
    trainer = quiet(strategy=FiveD(Parts(tp), ZeRO(stage=stage)), devices=devices, use_distributed_sampler=False)
    module = ByHand()
    trainer.fit(module, rows(16, 4))
    return module.norms, trainer.strategy.by_parameter(dict(module.named_parameters()))


@pytest.mark.parametrize(("tp", "stage", "devices"), [(2, 0, 2), (4, 1, 4), (2, 3, 4)])
def test_steps_by_hand_see_and_change_complete_gradients(ranks: RankPool, tp: int, stage: int, devices: int) -> None:
    alone = ByHand()
    quiet(devices=1).fit(alone, DataLoader(Tokens(16), batch_size=4))
    norms, weights = ranks(devices, _by_hand, tp, stage, devices, **TRAINER)[0]
    assert norms == pytest.approx(alone.norms, rel=1e-5)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-5, atol=1e-6)

"""What people do to gradients by hand, and with several optimizers, gives the numbers of one process where experts live on other ranks."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from lightning_5d import ExpertParallel, FiveD, PipelineParallel, TensorParallel, ZeRO
from lightning_5d.models import LanguageModel
from tests.expert_parallel.adapted import rows
from tests.expert_parallel.test_training import mixture
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, apart, fit


class Steep(LanguageModel):
    """With plain SGD, of which each step depends on how far gradients are clipped."""

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        return super().loss(batch) * 20

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


class InHook(Steep):
    """Clips in the hook that is there for gradients."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("norm", clip_grad_norm_(self.parameters(), 1.0))
        clip_grad_value_(self.parameters(), 0.05)


class Largest(Steep):
    """Clips after backward, and in place of Lightning by the largest element, one tensor after the other."""

    def on_after_backward(self) -> None:
        clip_grad_norm_(self.parameters(), 5.0)

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        self.log("norm", clip_grad_norm_(self.parameters(), 0.1, norm_type=float("inf"), foreach=False))


class Growing(Steep):
    """Sums up more microbatches from its second epoch on."""

    def configure_callbacks(self) -> list[L.Callback]:
        return [GradientAccumulationScheduler({0: 1, 1: 2})]


class TwoOptimizers(Steep):
    """One for experts and one for the rest, clipped each by itself or all together."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        experts, others = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        if batch_idx % 2:
            self.log("norm", clip_grad_norm_(self.parameters(), 1.0))
        else:
            clip_grad_norm_([p for group in experts.param_groups for p in group["params"]], 0.2)
            self.clip_gradients(others, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        for optimizer in (experts, others):
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": loss.detach()}

    def configure_optimizers(self) -> Any:
        experts = [parameter for name, parameter in self.named_parameters() if ".experts." in name]
        inside = {id(parameter) for parameter in experts}
        others = [parameter for parameter in self.parameters() if id(parameter) not in inside]
        return [torch.optim.SGD(experts, lr=0.05, momentum=0.9), torch.optim.SGD(others, lr=0.02)]


KINDS: dict[str, tuple[type[Steep], dict[str, Any]]] = {
    "in a hook": (InHook, {}),
    "in place of Lightning": (Largest, {}),
    "two optimizers": (TwoOptimizers, {}),
    "accumulation": (Growing, {"max_epochs": 2}),
}


def _module(kind: type[Steep]) -> Steep:
    torch.manual_seed(0)
    return kind(decoder=mixture(balance=0.0)().hparams["decoder"])


def _runs(rank: int, strategy: Callable[[], FiveD] | None, world: int) -> list[Any]:
    return [
        fit(rank, partial(_module, kind), partial(rows, 8), strategy, precision="64-true", devices=world, **settings)
        for kind, settings in KINDS.values()
    ]


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    return _runs(0, None, 1)


@pytest.mark.parametrize("plugins", [[ZeRO(stage=3)], [TensorParallel(2)]], ids=["zero3", "tp2"])
def test_steps_are_those_of_one_process(ranks: RankPool, alone: list[Any], plugins: list[Any]) -> None:
    found = ranks(2, _runs, partial(FiveD, ExpertParallel(2), *plugins), 2, **SEPARATE)
    for index, (kind, expected) in enumerate(zip(KINDS, alone, strict=True)):
        differences = apart([each[index] for each in found], expected, 1e-6)
        assert max(differences.values()) < 1e-10, (kind, differences)
        if "norm" in expected["metrics"]:
            norms = [each[index]["metrics"]["norm"] for each in found]
            assert norms == pytest.approx(2 * [expected["metrics"]["norm"]], rel=1e-6), kind
    assert len({run["norms"][-1] for run in alone}) == len(KINDS), "nothing was clipped"


class PutTogether(Steep):
    """A norm of its own."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        torch.stack([parameter.grad.norm() for parameter in self.parameters() if parameter.grad is not None]).norm()


def _staged(rank: int) -> None:
    strategy = partial(FiveD, ExpertParallel(2), PipelineParallel(2, microbatches=2), timeout=30)
    fit(rank, partial(_module, PutTogether), rows, strategy, devices=4)


def test_a_norm_put_together_by_hand_is_not_taken_for_that_of_all_stages(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"one of 2 stages alone\. Call trainer\.strategy\.gradient_norm"):
        ranks(4, _staged, **SEPARATE)

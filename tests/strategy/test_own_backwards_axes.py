"""Backwards of the user's own under all axes: the numbers of one process, or one clear error."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_5d import ContextParallel, ExpertParallel, FiveD, PipelineParallel, TensorParallel, ZeRO
from lightning_5d.models import LanguageModel
from tests.context_parallel.test_training import uneven
from tests.expert_parallel.test_training import mixture
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, compare, decoder, fit


class Attacked(LanguageModel):
    """Noise on logits, by the sign of a gradient that a backward through the whole model finds beside those of weights."""

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        noise = torch.zeros(*batch["labels"].shape, self.decoder.config.vocab_size, requires_grad=True)
        self._noisy(batch, noise).backward()
        assert noise.grad is not None
        return self._noisy(batch, 0.3 * noise.grad.sign())

    def _noisy(self, batch: Mapping[str, Tensor], noise: Tensor) -> Tensor:
        output = self(batch["input_ids"])
        logits, losses = (output, {}) if isinstance(output, Tensor) else output
        return F.cross_entropy((logits + noise).flatten(0, 1), batch["labels"].flatten()) + sum(losses.values())


def _of(make: Any, kind: type[LanguageModel] = Attacked) -> LanguageModel:
    module: LanguageModel = make()
    module.__class__ = kind
    return module


def attacked(**changes: Any) -> Any:
    return partial(_of, decoder(**changes))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp+sp"])
def test_tensor_ranks(ranks: RankPool, sequence: bool, accumulate: int) -> None:
    plugins = TensorParallel(2, sequence_parallel=sequence), ZeRO(stage=1)
    compare(ranks, attacked(), *plugins, world=4, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_context_ranks(ranks: RankPool, accumulate: int) -> None:
    # Rounding of single weights is near the bound in fp32.
    precision: dict[str, Any] = {"precision": "64-true", "tolerance": 1e-9}
    data = partial(uneven, tokens=8)
    compare(ranks, attacked(), ContextParallel(2), world=2, data=data, accumulate_grad_batches=accumulate, **precision)


@pytest.mark.parametrize("stage", [1, 3])
def test_expert_ranks(ranks: RankPool, stage: int) -> None:
    make = partial(_of, mixture(balance=0.0))
    compare(ranks, make, ExpertParallel(2), ZeRO(stage=stage), world=4, accumulate_grad_batches=2)


def test_layers_that_run_again(ranks: RankPool) -> None:
    compare(ranks, attacked(), ZeRO(stage=3), world=2, strategy={"activation_checkpointing": "full"})


class AttackedByHand(Attacked):
    """Steps by hand, with backwards that Lightning does not know of."""

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()


class Asking(LanguageModel):
    """Wants gradients of weights without leaving them in `grad`."""

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        torch.autograd.grad(loss, [self.decoder.norm.weight], retain_graph=True)
        return loss


def _by_hand() -> LanguageModel:
    module = _of(decoder(), AttackedByHand)
    module.automatic_optimization = False
    return module


@pytest.mark.parametrize("axis", [TensorParallel(2, sequence_parallel=True), ContextParallel(2)])
def test_steps_by_hand(ranks: RankPool, axis: Any) -> None:
    compare(ranks, _by_hand, axis, world=2, tokens=8, gradient_clip_val=None)


def test_gradients_of_weights_on_tensor_ranks_cannot_be_asked_for(ranks: RankPool) -> None:
    make, strategy = partial(_of, decoder(), Asking), partial(FiveD, TensorParallel(2))
    with pytest.raises(RankError, match=r"torch\.autograd\.grad asks for gradients of weights"):
        ranks(2, partial(fit, module=make, data=partial(uneven, tokens=8), strategy=strategy, devices=2), **SEPARATE)


def test_a_pipeline_says_no(ranks: RankPool) -> None:
    strategy = partial(FiveD, PipelineParallel(2, microbatches=2))
    with pytest.raises(RankError, match="calls `backward` by itself, but under a pipeline"):
        ranks(
            2, partial(fit, module=attacked(), data=partial(uneven, tokens=8), strategy=strategy, devices=2), **SEPARATE
        )

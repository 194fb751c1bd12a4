"""What the gradient of a window is: means, weighted means, incomplete windows, microbatches without a valid token."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_5d import FiveD, ZeRO
from lightning_5d.loss import weight_of
from lightning_5d.verify import Parity, verify
from tests.modules import Line, TinyLM, batches
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.trainers import quiet, whole, zero

TRAINER = {"backend": None, "timeout": 50.0}
IGNORED = -100


class Tokenwise(TinyLM):
    """Mean over valid tokens, with their number as weight; 0/0 where there is none, as everybody writes it."""

    def loss(self, batch: Tensor) -> Any:
        logits, labels = self(batch[:, :-1].clamp(min=0)), batch[:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
        valid = (labels != IGNORED).sum()
        return {"loss": losses.sum() / valid, "weight": valid}

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None: ...


def masked(rows: Tensor, valid: list[int]) -> Tensor:
    """Row i keeps its first `valid[i]` targets."""
    rows = rows.clone()
    for row, keep in zip(rows, valid, strict=True):
        row[1 + keep :] = IGNORED
    return rows


UNEVEN = [[6, 1], [2, 2], [0, 0], [5, 6], [1, 0], [6, 6], [3, 0], [0, 0], [0, 0], [4, 4], [1, 1], [6, 2]]


def _uneven(rank: int, ranks: int, stage: int, accumulate: int) -> Parity:
    data = [masked(rows, valid) for rows, valid in zip(batches(12), UNEVEN, strict=True)]
    return verify(
        Tokenwise(),
        data,
        FiveD(ZeRO(stage=stage)),
        devices=ranks,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
    )


@pytest.mark.parametrize(("world", "accumulate"), [(1, 4), (2, 1), (2, 3), (4, 1)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_uneven_token_counts_equal_one_big_batch(ranks: RankPool, stage: int, world: int, accumulate: int) -> None:
    result = ranks(world, _uneven, world, stage, accumulate, **TRAINER)[0]
    assert result.passed, "\n" + result.table()


def _unweighted_would_differ(rank: int) -> float:
    data = [masked(rows, valid) for rows, valid in zip(batches(4), UNEVEN[:4], strict=True)]
    module = Tokenwise()
    outputs = [module.training_step(batch, 0) for batch in data]
    present = [o for o in outputs if o["weight"] > 0]
    total = sum(float(o["loss"] * o["weight"]) for o in present) / sum(int(o["weight"]) for o in present)
    plain = sum(float(o["loss"]) for o in present) / len(present)
    return abs(total - plain)


def test_the_weights_matter_in_these_batches() -> None:
    assert _unweighted_would_differ(0) > 1e-2


def _line(rank: int, ranks: int, stage: int, values: list[float], accumulate: int) -> list[float]:
    trainer = zero(stage, ranks, accumulate_grad_batches=accumulate, use_distributed_sampler=False)
    module = Line()
    trainer.fit(module, DataLoader(torch.tensor(values), batch_size=1))
    return module.seen


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_last_incomplete_window_is_a_mean_too(ranks: RankPool, stage: int, world: int) -> None:
    """6 batches of gradient 1, windows of 4: the second step sees 1.0, not 0.5."""
    for seen in ranks(world, _line, world, stage, [1.0] * 6, 4, **TRAINER):
        assert seen == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("world", [1, 2])
def test_a_window_longer_than_the_epoch_is_the_epoch(ranks: RankPool, world: int) -> None:
    """2 batches, windows of 4: one step per epoch, its divisor is 2."""
    for seen in ranks(world, _line, world, 1, [1.0, 3.0], 4, **TRAINER):
        assert seen == pytest.approx([2.0])


class SometimesWeighted(Line):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "weight": 1} if batch_idx == 0 else loss


def _mixed(rank: int) -> None:
    trainer = quiet(strategy=FiveD(), devices=1, accumulate_grad_batches=2)
    trainer.fit(SometimesWeighted(), DataLoader(torch.ones(2), batch_size=1))


def test_weights_in_some_steps_of_a_window_only_are_refused(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="Of 2 microbatches in one accumulation window 1 returned a weight"):
        ranks(1, _mixed, **TRAINER)


@pytest.mark.parametrize(
    ("weight", "words"), [(-1.0, "not negative"), (float("nan"), "finite"), (torch.ones(2), "one number")]
)
def test_a_weight_that_is_no_count_is_refused(weight: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        weight_of({"loss": torch.ones(()), "weight": weight})


class Constant(TinyLM):
    """A step whose loss has no graph on rank 1."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "weight": 0 if self.global_rank == 1 else 1}


def _one_sided(rank: int, stage: int, ranks: int) -> dict[str, Tensor]:
    from tests.strategy.test_trainer import Data

    trainer = zero(stage, ranks)
    module = Constant()
    trainer.fit(module, Data(val=4))
    return whole(module)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_whose_weights_are_all_zero_takes_part_and_adds_nothing(ranks: RankPool, stage: int) -> None:
    first, second = ranks(2, _one_sided, stage, 2, **TRAINER)
    for name in first:
        assert torch.equal(first[name], second[name])
        assert torch.isfinite(first[name]).all()
    assert not torch.equal(first["head.weight"], TinyLM().head.weight)

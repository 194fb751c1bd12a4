"""Training with cut layers equals training in one process."""

from typing import Any

import pytest
from torch import Tensor

from lightning_5d import TensorParallel, ZeRO
from lightning_5d.models import LanguageModel
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import compare, decoder

SEQUENCE = pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp+sp"])


# Keys and values that several ranks hold meet the cut sequence in their gradients; where each has its own, nothing does.
@pytest.mark.parametrize(
    ("size", "heads", "sequence"),
    [
        (2, (4, 1), False),
        (2, (4, 1), True),
        (2, (4, 2), False),
        (2, (4, 4), True),
        (4, (4, 1), False),
        (4, (4, 1), True),
        (4, (4, 2), False),
        (4, (4, 2), True),
        (4, (4, 4), False),
    ],
)
def test_the_decoder_trains_as_in_one_process(
    ranks: RankPool, size: int, heads: tuple[int, int], sequence: bool
) -> None:
    module = decoder(num_heads=heads[0], num_kv_heads=heads[1])
    compare(ranks, module, TensorParallel(size, sequence_parallel=sequence), world=size, tokens=8)


@pytest.mark.parametrize(("tokens", "sequence"), [(7, True), (3, True), (3, False)])
def test_lengths_that_the_ranks_do_not_divide(ranks: RankPool, tokens: int, sequence: bool) -> None:
    compare(ranks, decoder(), TensorParallel(4, sequence_parallel=sequence), world=4, tokens=tokens)


@SEQUENCE
def test_tied_embeddings(ranks: RankPool, sequence: bool) -> None:
    compare(ranks, decoder(tie_embeddings=True), TensorParallel(2, sequence_parallel=sequence), world=2)


# Only with a cut sequence are there gradients of which each rank has a summand.
@pytest.mark.parametrize(("stage", "sequence"), [(0, True), (1, True), (2, False), (2, True), (3, True)])
def test_every_stage_of_zero(ranks: RankPool, stage: int, sequence: bool) -> None:
    tensor = TensorParallel(2, sequence_parallel=sequence)
    compare(ranks, decoder(), tensor, ZeRO(stage=stage), world=4, accumulate_grad_batches=2)


def test_replicas_of_shards(ranks: RankPool) -> None:
    tensor = TensorParallel(2, sequence_parallel=True)
    compare(ranks, decoder(), tensor, ZeRO(stage=2, replicate=2), world=8, rows=32, batch=8)


@SEQUENCE
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activations_computed_again(ranks: RankPool, mode: str, sequence: bool) -> None:
    tensor = TensorParallel(2, sequence_parallel=sequence)
    compare(ranks, decoder(), tensor, world=2, strategy={"activation_checkpointing": mode})


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping(ranks: RankPool, algorithm: str) -> None:
    tensor = TensorParallel(2, sequence_parallel=True)
    bound: dict[str, Any] = {"gradient_clip_algorithm": algorithm, "gradient_clip_val": 0.05}
    compare(ranks, decoder(), tensor, ZeRO(stage=2), world=4, **bound)


class Beforehand(LanguageModel):
    """Runs a backward of its own, for gradients of inputs say, whose gradients of weights `zero_grad` drops."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.loss(batch).backward()
        return super().training_step(batch, batch_idx)


def beforehand() -> Beforehand:
    module: Any = decoder()()
    module.__class__ = Beforehand
    return module  # type: ignore[no-any-return]


def test_gradients_of_a_backward_inside_of_the_step_are_dropped_before_the_next(ranks: RankPool) -> None:
    compare(ranks, beforehand, TensorParallel(2), world=2)

"""The tensor axis with pipelines, precisions and whatever else a run may have."""

from typing import Any

import pytest
import torch

from lightning_5d import PipelineParallel, TensorParallel, ZeRO
from lightning_5d.pipeline_parallel import SCHEDULES
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import Dealt, Rows, compare, decoder

SEQUENCE = pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp+sp"])


@pytest.mark.parametrize(("name", "sequence"), [(name, index % 2 == 0) for index, name in enumerate(SCHEDULES)])
def test_every_schedule(ranks: RankPool, name: str, sequence: bool) -> None:
    chunks: dict[str, Any] = {"chunks": 2} if SCHEDULES[name].chunks is None else {}
    pipeline = PipelineParallel(2, schedule=name, microbatches=4, **chunks)
    compare(ranks, decoder(num_layers=4), pipeline, TensorParallel(2, sequence_parallel=sequence), world=4)


@pytest.mark.parametrize(("stage", "sequence"), [(1, True), (3, False)])
def test_three_axes(ranks: RankPool, stage: int, sequence: bool) -> None:
    plugins = PipelineParallel(2, microbatches=2), TensorParallel(2, sequence_parallel=sequence), ZeRO(stage=stage)
    compare(ranks, decoder(num_layers=3), *plugins, world=8, accumulate_grad_batches=2)


def test_tied_embeddings_on_the_first_and_last_stage(ranks: RankPool) -> None:
    plugins = PipelineParallel(2, microbatches=4), TensorParallel(2, sequence_parallel=True)
    # In fp32 Adam makes more of the rounding of small gradients than 1e-5 of a weight, on some processors.
    module = decoder(num_layers=3, tie_embeddings=True)
    compare(ranks, module, *plugins, world=4, tolerance=1e-9, precision="64-true")


def test_sixteen_ranks(ranks: RankPool) -> None:
    plugins = PipelineParallel(2, microbatches=4), TensorParallel(4, sequence_parallel=True), ZeRO(stage=1)
    compare(ranks, decoder(num_layers=3), *plugins, world=16, rows=32, batch=8, tokens=8)


class Varying(Rows):
    """Rows of 7 and of 8 tokens in turn, four of each: of both, four ranks hold 2 tokens each."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        return {name: value[: 7 + index // 4 % 2] for name, value in row.items()}


def _varying() -> Dealt:
    return Dealt(Varying(16, 8), 4)


@pytest.mark.parametrize(("schedule", "checkpointing"), [("1f1b", None), ("zb_v", "full")])
def test_stages_know_lengths_that_the_ranks_do_not_divide(ranks: RankPool, schedule: str, checkpointing: Any) -> None:
    pipeline = PipelineParallel(2, schedule=schedule, microbatches=4)
    tensor = TensorParallel(4, sequence_parallel=True)
    strategy = {"activation_checkpointing": checkpointing}
    compare(
        ranks, decoder(num_layers=4), pipeline, tensor, world=8, data=_varying, strategy=strategy, limit_val_batches=2
    )

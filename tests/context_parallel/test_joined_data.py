"""Ranks of the context axis join the data ranks: ZeRO shards and averages over both, everything else goes by data ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from lightning_5d import FiveD, PipelineParallel, TensorParallel, ZeRO
from lightning_5d.callbacks import Throughput
from lightning_5d.models import DecoderConfig, LanguageModel
from lightning_5d.parallelism import RunContext
from lightning_5d.verify import verify
from tests.checkpoint.same import assert_same
from tests.context_parallel.standing_in import RowsApart
from tests.modules import TinyLM, Tokens
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, SIZES, Dealt, Rows, apart, compare, decoder, fit
from tests.trainers import quiet


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_with_two_data_ranks(ranks: RankPool, stage: int) -> None:
    compare(ranks, decoder(), RowsApart(2), ZeRO(stage=stage), world=4, accumulate_grad_batches=2)


@pytest.mark.parametrize("stage", [0, 3])
def test_one_data_rank(ranks: RankPool, stage: int) -> None:
    compare(ranks, decoder(), RowsApart(2), ZeRO(stage=stage), world=2)


@pytest.mark.parametrize("stage", [0, 3])
def test_hybrid(ranks: RankPool, stage: int) -> None:
    compare(ranks, decoder(), RowsApart(2), ZeRO(stage=stage, replicate=2), world=8, rows=32, batch=8)


def test_replicas_of_context_ranks_alone(ranks: RankPool) -> None:
    compare(ranks, decoder(), RowsApart(2), ZeRO(stage=2, replicate=2), world=4)


LAYERS = "decoder.layers.*"
BLOCKS = {
    **{f"{LAYERS}.self_attn.{name}_proj": "colwise" for name in "qkv"},
    **{f"{LAYERS}.mlp.{name}_proj": "colwise" for name in ("gate", "up")},
    **{f"{LAYERS}.{name}": "rowwise" for name in ("self_attn.o_proj", "mlp.down_proj")},
}


@pytest.mark.parametrize("stage", [0, 3])
def test_tensor_axis(ranks: RankPool, stage: int) -> None:
    # Without the vocabulary: the stand-in's doors know of no logits that are cut.
    compare(ranks, decoder(), RowsApart(2), TensorParallel(2, plan=BLOCKS), ZeRO(stage=stage), world=8)


def test_tensor_axis_without_other_data_ranks(ranks: RankPool) -> None:
    compare(ranks, decoder(), RowsApart(2), TensorParallel(2, sequence_parallel=True, plan=BLOCKS), world=4)


@pytest.mark.parametrize(
    ("schedule", "zero"),
    [("1f1b", ZeRO(stage=1)), ("zb_h1", ZeRO(stage=3, per_microbatch=True)), ("dualpipe_v", ZeRO(stage=2))],
)
def test_pipelines(ranks: RankPool, schedule: str, zero: ZeRO) -> None:
    pipeline = PipelineParallel(2, schedule=schedule, microbatches=4)
    compare(ranks, decoder(num_layers=4), pipeline, RowsApart(2), zero, world=4, batch=8)


@pytest.mark.parametrize(
    ("pipeline", "shown"),
    [
        (PipelineParallel(2, schedule="zb_h1", microbatches=2), False),
        (PipelineParallel(2, schedule="1f1b", microbatches=2), True),
        (PipelineParallel(2, schedule="1f1b", microbatches=2, split=[0, 4]), True),
        (PipelineParallel(2, schedule="zb_v", microbatches=2), True),
    ],
    ids=["whole", "shown", "nothing first", "two on a rank"],
)
def test_stages_of_blocks_that_are_doors_themselves(ranks: RankPool, pipeline: PipelineParallel, shown: bool) -> None:
    module, deal = partial(TinyLM, layers=4), partial(Dealt, Tokens(16), 8)
    compare(ranks, module, pipeline, RowsApart(2, shown), world=4, data=deal)


def test_pipeline_with_weights_on_both_ends_and_steps_ahead_of_their_verdict(ranks: RankPool) -> None:
    pipeline = PipelineParallel(2, schedule="zb_h1", microbatches=2, post_validation=True)
    module = decoder(num_layers=2, tie_embeddings=True)
    compare(ranks, module, pipeline, RowsApart(2), ZeRO(stage=1), world=8, batch=8)


def test_sixteen_ranks(ranks: RankPool) -> None:
    plugins = PipelineParallel(2, microbatches=2), RowsApart(2), TensorParallel(2, plan=BLOCKS), ZeRO(stage=3)
    compare(ranks, decoder(num_layers=4), *plugins, world=16, rows=32, batch=16)


@pytest.mark.parametrize("zero", [ZeRO(stage=2, offload="cpu"), ZeRO(stage=3, offload="cpu", replicate=2)])
def test_offload(ranks: RankPool, zero: ZeRO) -> None:
    compare(ranks, decoder(), RowsApart(2), zero, world=4)


@pytest.mark.parametrize("stage", [0, 3])
def test_sixteen_bits(ranks: RankPool, stage: int) -> None:
    # To one process in the same precision, as `fived verify` does.
    parity = ranks(4, partial(_verify, stage=stage), **SEPARATE)
    assert all(parity), parity


def _verify(rank: int, stage: int) -> Any:
    strategy = FiveD(RowsApart(2), ZeRO(stage=stage))
    rows = Rows(16, 6)
    batches = [default_collate([rows[2 * i], rows[2 * i + 1]]) for i in range(8)]
    result = verify(decoder()(), batches, strategy, devices=4, precision="bf16-mixed")
    return result.passed or str(result)


class Weighted(LanguageModel):
    """Means over the tokens that count, and how many these are."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "weight": (batch["labels"] >= 0).sum()}


class Uneven(Rows):
    """Rows of which the first i % 6 tokens do not count."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        row["labels"] = row["labels"].clone()
        row["labels"][: index % 6] = -100
        return row


def _weighted() -> Weighted:
    torch.manual_seed(0)
    return Weighted(DecoderConfig(**SIZES), {"lr": 3e-3, "warmup_steps": 2})


@pytest.mark.parametrize("pipeline", [(), (PipelineParallel(2, microbatches=2),)], ids=["step", "schedule"])
def test_weights_of_losses_go_by_data_ranks(ranks: RankPool, pipeline: tuple[Any, ...]) -> None:
    deal = partial(Dealt, Uneven(16, 6), 8)
    plugins = (*pipeline, RowsApart(2), ZeRO(stage=2))
    world = 8 if pipeline else 4
    run = partial(fit, module=_weighted, data=deal, gradient_clip_val=0.5)
    found = ranks(world, partial(run, strategy=partial(FiveD, *plugins), devices=world), **SEPARATE)
    expected = run(0, strategy=None)
    differences = apart(found, expected, 1e-6)
    del differences["losses"]  # each data rank's is the mean over its own tokens
    assert max(differences.values()) < 1e-5, differences
    assert {row["metrics"]["train_loss"] for row in found} == {found[0]["metrics"]["train_loss"]}


class Steady(LanguageModel):
    """With a learning rate that does not know how long the run will be."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def steady() -> Steady:
    """The reference model with it."""
    torch.manual_seed(0)
    return Steady(DecoderConfig(**SIZES))


def test_a_checkpoint_goes_from_context_and_data_ranks_to_one_process_and_on_to_the_tensor_axis(
    ranks: RankPool, tmp_path: Path
) -> None:
    layouts: list[tuple[Any, ...] | None] = [
        (RowsApart(2), ZeRO(stage=3)),
        None,
        (RowsApart(2), TensorParallel(2, plan=BLOCKS), ZeRO(stage=1)),
        (RowsApart(2), ZeRO(stage=1, replicate=2)),
    ]
    for epochs, plugins in enumerate(layouts, 1):
        if plugins is None:
            _resume(0, tmp_path / "changing.ckpt", epochs, None)
        else:
            ranks(4, _resume, tmp_path / "changing.ckpt", epochs, plugins, **SEPARATE)
    _resume(0, tmp_path / "alone.ckpt", len(layouts), None)
    found, expected = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("changing", "alone"))
    assert found["global_step"] == expected["global_step"] == 8
    assert_same(found, expected)


def _resume(rank: int, path: Path, epochs: int, plugins: Any) -> None:
    chosen: Any = {"devices": 1} if plugins is None else {"strategy": FiveD(*plugins), "devices": 4}
    trainer = quiet(use_distributed_sampler=False, max_epochs=epochs, **chosen)
    module = steady()
    trainer.fit(module, datamodule=Dealt(Rows(16, 6), 8), ckpt_path=path if path.exists() else None)
    trainer.save_checkpoint(path)


def test_tokens_samples_and_operations_count_once(ranks: RankPool) -> None:
    found = ranks(4, _count, (RowsApart(2), ZeRO(stage=1)), **SEPARATE)
    expected = _count(0, None)
    assert (expected["tokens"], expected["samples"]) == (16 * 6, 16)
    assert expected["model_flops"] > 0
    assert all(totals == expected for totals in found), (found, expected)


def _count(rank: int, plugins: Any) -> dict[str, float]:
    chosen: Any = {"devices": 1} if plugins is None else {"strategy": FiveD(*plugins), "devices": 4}
    throughput = Throughput()
    trainer = quiet(callbacks=[throughput], use_distributed_sampler=False, **chosen)
    trainer.fit(decoder()(), datamodule=Dealt(Rows(16, 6), 4))
    return throughput.totals


def test_context_ranks_with_different_batches_are_refused(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="Ranks 0, 1 must hold the same batch, but the first training batch differs"):
        ranks(2, _differ, **SEPARATE)


def _differ(rank: int) -> None:
    trainer = quiet(strategy=FiveD(RowsApart(2)), devices=2, use_distributed_sampler=False)
    rows = Rows(8, 6)
    rows.ids = (rows.ids + rank) % 13
    trainer.fit(decoder()(), train_dataloaders=DataLoader(rows, batch_size=2))


def test_weights_that_each_rank_would_change_by_its_own_tokens_are_refused_with_one_data_rank() -> None:
    module = nn.Embedding(4, 2, max_norm=1.0)
    sizes = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 2, "tp": 1}
    (problem,) = ZeRO(stage=0).validate(RunContext(2, 1, "cpu", "32-true", sizes, module))
    assert "max_norm" in str(problem)
    assert not ZeRO(stage=0).validate(RunContext(1, 1, "cpu", "32-true", sizes | {"cp": 1}, module))

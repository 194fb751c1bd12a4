"""A pipeline that cannot run is one clear error: before any process starts where that is possible, and never a wait."""

import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_5d import FiveD, PipelineParallel, ZeRO
from lightning_5d.pipeline_parallel import make_schedule, write_schedule
from tests.modules import TinyLM, Tokens
from tests.pipeline_parallel.recorded import fit, fit_alone, rows, worst
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.trainers import quiet

TRAINER: dict[str, Any] = {"backend": None, "timeout": 30.0}
SECONDS = 30


def _refused(pipeline: PipelineParallel, devices: int = 2, *others: Any) -> str:
    with pytest.raises(MisconfigurationException) as error:
        quiet(strategy=FiveD(pipeline, *others), devices=devices)
    return str(error.value)


@pytest.mark.parametrize(
    ("pipeline", "devices", "words"),
    [
        (PipelineParallel(2, schedule="1f1"), 2, ["no schedule '1f1'", "nearest is 1f1b"]),
        (PipelineParallel(2, schedule="zbh2"), 2, ["no schedule 'zbh2'", "nearest is zb_h2"]),
        (PipelineParallel(2, schedule="1f1b", chunks=2), 2, ["chunks=2", "leave chunks out, or use interleaved_1f1b"]),
        (PipelineParallel(2, schedule="zb_h1", group_size=2), 2, ["no group_size", "interleaved_1f1b"]),
        (
            PipelineParallel(4, schedule="interleaved_1f1b", chunks=2, microbatches=6, group_size=2),
            4,
            ["group_size is 2", "4 ranks and 6 microbatches", "nearest is 4"],
        ),
        (PipelineParallel(3, schedule="dualpipe", microbatches=8), 3, ["3 ranks", "use 2 or 4"]),
        (PipelineParallel("auto"), 2, ["size='auto'", "1 or more"]),  # type: ignore[arg-type]
        (PipelineParallel(0), 2, ["size=0", "1 or more"]),
        (PipelineParallel(2, microbatches=0), 2, ["microbatches=0", "1 or more"]),
        (PipelineParallel(2, microbatches=2.5), 2, ["microbatches=2.5", "1 or more"]),  # type: ignore[arg-type]
        (PipelineParallel(3), 4, ["4 ranks cannot be divided by pp=3", "2 works with 4 ranks", "6 ranks"]),
        (PipelineParallel(2, schedule="missing.csv"), 2, ["missing.csv", "No such file"]),
        (PipelineParallel(2, split="halves"), 2, ["split='halves'", "'even', 'blocks'"]),  # type: ignore[arg-type]
        (PipelineParallel(2, split=[1, 2, 3]), 2, ["split=[1, 2, 3]", "3 stages", "2"]),
    ],
)
def test_numbers_that_do_not_work_are_refused_when_the_trainer_is_made(
    pipeline: PipelineParallel, devices: int, words: list[str]
) -> None:
    text = _refused(pipeline, devices)
    for word in words:
        assert word in text, text


def test_all_that_is_wrong_comes_in_one_error() -> None:
    text = _refused(PipelineParallel(3, schedule="1f1", microbatches=2), 4, ZeRO(stage=7))
    assert text.startswith("3 settings do not work:")
    for word in ("no schedule '1f1'", "4 ranks cannot be divided by pp=3", "stage=7"):
        assert word in text
    text = _refused(PipelineParallel("auto", microbatches=0, chunks=-1))  # type: ignore[arg-type]
    for word in ("size='auto'", "microbatches=0", "chunks=-1"):
        assert word in text


DEADLOCKED = "0F0,0BW0,0F1,0BW1\n1F1,1BW1,1F0,1BW0\n"
INCOMPLETE = "0F0,0F1,0BW0\n1F0,1BW0,1F1,1BW1\n"


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (DEADLOCKED, ["Rank 0 waits at BW of stage 0, microbatch 0 for B of stage 1", "Rank 1 waits at F of stage 1"]),
        (INCOMPLETE, ["B of stage 0, microbatch 1 (rank 0), is missing"]),
        ("0F0,0X1\n", ["Line 1, cell 2", "0X1"]),
        ("0F0,0BW0\n1F0,1BW0\n", ["microbatches=1, not 2", "use 1"]),
    ],
)
def test_a_table_that_cannot_run_is_refused_with_the_actions_concerned(
    tmp_path: Path, table: str, words: list[str]
) -> None:
    path = tmp_path / "own.csv"
    path.write_text(table)
    text = _refused(PipelineParallel(2, schedule=str(path), microbatches=2))
    for word in words:
        assert word in text, text


def _with_table(rank: int, path: str) -> Any:
    strategy = lambda: FiveD(PipelineParallel(2, schedule=path, microbatches=4))  # noqa: E731
    return fit(rank, lambda: TinyLM(layers=3), lambda **_: rows(16, 8), strategy, 2)


def test_a_schedule_from_a_table_trains_as_one_process_does(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    write_schedule(make_schedule("zb_h1", 2, 4), path)
    found = ranks(2, _with_table, str(path), **TRAINER)
    assert max(worst(found, fit_alone(lambda: TinyLM(layers=3), lambda: rows(16, 8))).values()) < 1e-5


def _one_stage(rank: int) -> Any:
    strategy = lambda: FiveD(PipelineParallel(1, microbatches=4))  # noqa: E731
    return fit(rank, lambda: TinyLM(layers=3), lambda **_: rows(16, 8), strategy, 1)


def test_a_pipeline_of_one_rank_trains_in_microbatches(ranks: RankPool) -> None:
    found = ranks(1, _one_stage, **TRAINER)
    assert max(worst(found, fit_alone(lambda: TinyLM(layers=3), lambda: rows(16, 8))).values()) < 1e-5


class ByHand(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(TinyLM):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class OwnBackwardByHand(OwnBackward, ByHand):
    pass


class TwoOptimizers(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.layers.parameters(), 0.1), torch.optim.SGD(self.head.parameters(), 0.1)]


class Returning(nn.Module):
    """A block that returns something else than tensors."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.linear, self.what = nn.Linear(8, 8), what

    def forward(self, x: Any) -> Any:
        x = self.linear(x[0] if isinstance(x, tuple) else x)
        return (x, self.what) if self.what is not None else x


class Strange(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Returning({1, 2}), Returning(None)])


class Nothing(TinyLM):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        self.loss(batch)


class Different(TinyLM):
    """Each rank has batches of its own."""

    def train_dataloader(self) -> Any:
        return DataLoader(Tokens(8, seed=self.global_rank), batch_size=4)


class Text(TinyLM):
    def train_dataloader(self) -> Any:
        return DataLoader([1, 2, 3], batch_size=None)  # type: ignore[arg-type]


MODULES = {
    each.__name__: each
    for each in (TinyLM, ByHand, OwnBackward, OwnBackwardByHand, TwoOptimizers, Strange, Nothing, Different, Text)
}


def _fit(rank: int, kind: str, size: int, arguments: dict[str, Any]) -> None:
    module: L.LightningModule = MODULES[kind]()
    data = None if kind in ("Different", "Text") else rows(8, 4)
    strategy = FiveD(PipelineParallel(size, microbatches=2, **arguments))
    quiet(strategy=strategy, devices=size, use_distributed_sampler=False).fit(module, data)


@pytest.mark.parametrize(
    ("kind", "size", "arguments", "words"),
    [
        ("TinyLM", 4, {}, ["4 stages are more than the model's 3 blocks", "at most 3 stages", "split=[1, 1, 1, 0]"]),
        ("TinyLM", 2, {"schedule": "zb_v"}, ["4 stages are more than the model's 3 blocks"]),
        ("TinyLM", 2, {"split": [1, 1]}, ["split=[1, 1] is for 2 blocks, but the model has 3", "nearest is [2, 1]"]),
        ("ByHand", 2, {}, ["ByHand optimizes by hand", "automatic_optimization = True"]),
        ("OwnBackward", 2, {}, ["OwnBackward overrides `backward`"]),
        (
            "OwnBackwardByHand",
            4,
            {},
            ["3 settings do not work", "optimizes by hand", "overrides `backward`", "4 stages are more"],
        ),
        ("TwoOptimizers", 2, {}, ["optimizes by hand"]),
        ("Strange", 2, {}, ["last block of stage 0", "is a set", "split=[...]"]),
        ("Nothing", 2, {}, ["training_step returned None on rank 1 of 2"]),
        ("Different", 2, {}, ["must hold the same batch", "the first training batch differs"]),
        ("Text", 2, {}, ["needs a tensor, or a list with one item per row", "split_batch"]),
    ],
)
def test_what_shows_with_the_module_or_the_first_batch_ends_all_ranks_at_once(
    ranks: RankPool, kind: str, size: int, arguments: dict[str, Any], words: list[str]
) -> None:
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(size, _fit, kind, size, arguments, **TRAINER)
    text = str(caught.value)
    assert "time limit" not in text
    assert time.monotonic() - started < SECONDS
    for word in words:
        assert word in text, text

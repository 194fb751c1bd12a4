"""Traps 64, 74 and 88 with experts: what one rank does alone is an error in seconds that says so, and ends all of them."""

import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_5d import FiveD, ZeRO, communication
from lightning_5d.launch import RankFailure, waiting
from tests.expert_parallel.routed import Experts, Routed, Router
from tests.launch.job import strike
from tests.launch.running import warm_fork_server
from tests.launch.test_failing import ranks_left_after
from tests.modules import loader
from tests.ranks.pool import RankPool
from tests.trainers import quiet
from tests.traps.test_experts import EP2
from tests.traps.test_pipeline import ends_at_once


class Alone(Routed):
    """Rank 1 leaves a layer out."""

    def __init__(self, left_out: int) -> None:
        super().__init__((4, 4))
        self.left_out = left_out

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, layer in enumerate(self.layers):
            if self.global_rank == 0 or number != self.left_out:
                x = layer(x)
        return self.head(x)


def _alone(rank: int, left_out: int) -> None:
    if left_out == 1:  # the ranks of the other case find it out themselves
        waiting.WAIT_SECONDS = 3.0
    quiet(strategy=FiveD(EP2, ZeRO(stage=1)), devices=2).fit(Alone(left_out), loader(16))


@pytest.mark.parametrize(
    ("left_out", "says"),
    [
        (0, r"Rank \d of the expert group is at layers.\d.experts where rank \d is at layers.\d.experts"),
        (1, r"(?s)waits where others do not come.*rank 0: train.*routed.py"),
    ],
    ids=["the first layer", "the last layer"],
)
def test_74_a_layer_that_one_rank_leaves_out_is_an_error_and_no_wait(ranks: RankPool, left_out: int, says: str) -> None:
    ends_at_once(ranks, 2, says, _alone, left_out)


class SavesOnZero(Routed):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.is_global_zero and self.trainer.global_step == 2:
            self.trainer.save_checkpoint(self.path)


def _saves_on_zero(rank: int, path: str) -> None:
    communication.PATIENCE_SECONDS = 2.0
    quiet(strategy=FiveD(EP2, ZeRO(stage=1)), devices=2).fit(SavesOnZero(path), loader(16))


def test_64_saving_experts_on_rank_0_alone_is_an_error_and_no_wait(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    ends_at_once(ranks, 2, r"(?s)waited 2 s in save_checkpoint for rank 1.*every rank", _saves_on_zero, str(path))
    assert not path.exists()


class StrikingExperts(Experts):
    how = ""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        if self.how:
            strike(self.how)
        return super().forward(hidden, index, weights)


class StrikingRouter(Router):
    how = ""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self.how:
            strike(self.how)
        return super().forward(hidden)


class Striking(Routed):
    """An expert or a router of one rank fails in the third step."""

    def __init__(self, where: str, how: str) -> None:
        super().__init__((4, 4))
        self.where, self.how = where, how
        block = self.layers[1]
        block.gate.__class__, block.experts.__class__ = StrikingRouter, StrikingExperts

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and self.global_rank == 1:
            getattr(self.layers[1], self.where).how = self.how


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "how", "says"),
    [("experts", "raise", "it raised ValueError: the planned failure"), ("gate", "kill", "it was killed by SIGKILL")],
    ids=["expert", "router"],
)
def test_88_a_rank_that_fails_in_an_expert_or_a_router_ends_the_others_and_is_told_once(
    capfd: pytest.CaptureFixture[str], where: str, how: str, says: str
) -> None:
    warm_fork_server()
    started = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        quiet(strategy=FiveD(EP2, start_method="forkserver"), devices=2).fit(Striking(where, how), loader(32))
    assert time.monotonic() - started < 30
    assert f"rank 1 of 2 failed first: {says}" in str(caught.value)
    assert ("in strike\n" in str(caught.value)) == (how == "raise")
    assert "the planned failure" not in capfd.readouterr().err
    assert ranks_left_after(25) == []

"""Layers with experts whose forwards backward runs again."""

from functools import partial
from typing import Any

import pytest

from lightning_5d import FiveD, PipelineParallel, ZeRO
from lightning_5d.activation_checkpointing import ActivationCheckpointing
from tests.expert_parallel.by_hand import Model, Sending
from tests.expert_parallel.in_stages import compare_settings
from tests.ranks.pool import RankPool

MICROBATCHES = 4
MODES: dict[str, Any] = {
    "full": "full",
    "selective": "selective",
    "half": 0.5,
    "experts": ActivationCheckpointing(modules=("*.experts",)),
    "every": ActivationCheckpointing(every=2),
}


def _strategy(schedule: str, checkpointing: Any = None) -> Any:
    pipeline = PipelineParallel(2, schedule=schedule, microbatches=MICROBATCHES)
    return partial(FiveD, pipeline, Sending(), ZeRO(stage=2), activation_checkpointing=checkpointing)


@pytest.mark.parametrize("modes", [["full", "selective", "experts", "every"], ["half"]])
def test_every_mode_sends_in_one_order_and_counts_once(ranks: RankPool, modes: list[str]) -> None:
    strategies = {f"{mode} {name}": _strategy(name, MODES[mode]) for mode in modes for name in ("1f1b", "zb_v")}
    compare_settings(ranks, 4, Model, strategies, microbatches=MICROBATCHES)


@pytest.mark.parametrize("reentrant", [False])
def test_what_users_run_again_themselves(ranks: RankPool, reentrant: bool) -> None:
    strategies = {name: _strategy(name) for name in ("1f1b", "zb_v")}
    compare_settings(ranks, 4, partial(Model, checkpointed=reentrant), strategies, microbatches=MICROBATCHES)

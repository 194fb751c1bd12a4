"""Checkpoints of experts go from any layout to any other, in the middle of epochs, and into plain torch and transformers."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_5d import ContextParallel, ExpertParallel, FiveD, Parallelism, PipelineParallel, TensorParallel, ZeRO
from lightning_5d.models import LanguageModel
from tests.checkpoint.same import assert_same
from tests.context_parallel.test_checkpoints import Losses
from tests.expert_parallel.adapted import Spreading, rows, sentences
from tests.expert_parallel.hugging_face_models import BALANCED
from tests.expert_parallel.test_training import mixture
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE
from tests.trainers import quiet

LAYOUTS: list[tuple[Parallelism, ...]] = [
    (ExpertParallel(2), ZeRO(stage=3)),
    (ExpertParallel(4),),
    (),
    (ExpertParallel(2, tensor=2), TensorParallel(2), ZeRO(stage=1)),
    (ZeRO(stage=2),),
    (ExpertParallel(4), ContextParallel(2), ZeRO(stage=1)),
    (ExpertParallel(2), PipelineParallel(2, microbatches=2), ZeRO(stage=1)),
]


def _steps(rank: int, path: Path, steps: int, strategy: Any, devices: int, kind: str) -> list[float]:
    """Up to so many steps, from where the last run ended; an epoch has four."""
    losses = Losses()
    chosen = {} if strategy is None else {"strategy": strategy()}
    settings: dict[str, Any] = {"max_epochs": -1, "max_steps": steps, "callbacks": [losses], "devices": devices}
    trainer = quiet(use_distributed_sampler=False, **settings, **chosen)
    made, data = KINDS[kind]
    trainer.fit(made(), datamodule=data(), ckpt_path=path if path.exists() else None)
    trainer.save_checkpoint(path)
    return losses.found


# Without a balance loss, which the microbatches of a pipeline would change.
KINDS: dict[str, Any] = {
    "own": (mixture(balance=0.0, bias_rate=0.01, shared=1), rows),
    "Mixtral": (partial(Spreading, "Mixtral"), partial(sentences, 16)),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_changes_its_layout_in_the_middle_of_epochs(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    path, alone = tmp_path / "changing.ckpt", tmp_path / "alone.ckpt"
    found: list[float] = []
    for number, plugins in enumerate(LAYOUTS, 1):
        devices = 4 if plugins else 1
        call = partial(
            _steps, path=path, steps=3 * number, strategy=partial(FiveD, *plugins), devices=devices, kind=kind
        )
        found += ranks(4, call, **SEPARATE)[0] if plugins else call(0)
    expected = _steps(0, alone, 3 * len(LAYOUTS), None, 1, kind)
    assert found == pytest.approx(expected, rel=1e-5)
    assert_same(torch.load(path, weights_only=True), torch.load(alone, weights_only=True))

"""Checkpoints of experts go from any layout to any other, in the middle of epochs, and into plain torch and transformers."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_5d import ContextParallel, ExpertParallel, FiveD, Parallelism, TensorParallel, ZeRO
from lightning_5d.expert_parallel.bias import balance_by_bias
from lightning_5d.models import LanguageModel
from tests.checkpoint.same import assert_same
from tests.context_parallel.test_checkpoints import Losses
from tests.expert_parallel.adapted import Spreading, rows, sentences
from tests.expert_parallel.test_training import mixture
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE
from tests.trainers import quiet

LAYOUTS: list[tuple[Parallelism, ...]] = [
    (ExpertParallel(2), ZeRO(stage=3)),
    (),
    (ExpertParallel(2, tensor=2), TensorParallel(2), ZeRO(stage=1)),
    (ExpertParallel(4), ContextParallel(2), ZeRO(stage=2)),
]


STEPS = [3, 6, 9, 11]
"""Where a layout ends; an epoch has four."""


class Steady(LanguageModel):
    """With a rate that does not depend on how long a run will be."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-4)
        balance_by_bias(self, optimizer)
        return optimizer


def steady() -> Steady:
    torch.manual_seed(0)
    return Steady(decoder=mixture(balance=0.0, bias_rate=0.01, shared=1)().hparams["decoder"])


KINDS: dict[str, Any] = {
    "own": (steady, rows),
    "Mixtral": (partial(Spreading, "Mixtral"), partial(sentences, 16)),
}


def _steps(rank: int, folder: Path, steps: int, strategy: Any, devices: int) -> list[list[float]]:
    """Each kind up to so many steps, from where the last run ended."""
    found = []
    for kind, (module, data) in KINDS.items():
        losses, path = Losses(), folder / f"{kind}.ckpt"
        chosen = {} if strategy is None else {"strategy": strategy()}
        settings: dict[str, Any] = {"max_epochs": -1, "max_steps": steps, "callbacks": [losses], "devices": devices}
        trainer = quiet(use_distributed_sampler=False, **settings, **chosen)
        trainer.fit(module(), datamodule=data(), ckpt_path=path if path.exists() else None)
        trainer.save_checkpoint(path)
        found.append(losses.found)
    return found


@pytest.mark.timeout(120)
def test_a_run_changes_its_layout_in_the_middle_of_epochs(ranks: RankPool, tmp_path: Path) -> None:
    folder, alone = tmp_path / "changing", tmp_path / "alone"
    found: list[list[float]] = [[], []]
    for steps, plugins in zip(STEPS, LAYOUTS, strict=True):
        devices = 4 if plugins else 1
        call = partial(_steps, folder=folder, steps=steps, strategy=partial(FiveD, *plugins), devices=devices)
        losses = ranks(4, call, **SEPARATE)[0] if plugins else call(0)
        found = [before + more for before, more in zip(found, losses, strict=True)]
    expected = _steps(0, alone, STEPS[-1], None, 1)
    for kind, mine, theirs in zip(KINDS, found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5), kind
        read, wanted = (torch.load(each / f"{kind}.ckpt", weights_only=True) for each in (folder, alone))
        assert_same(read, wanted, atol=1e-5)
    loaded = Steady.load_from_checkpoint(folder / "own.ckpt", weights_only=True)
    bias = loaded.decoder.layers[0].mlp.gate.expert_bias
    assert bias.abs().max() > 0.01
    assert bias.equal(read_bias(alone))


def read_bias(folder: Path) -> torch.Tensor:
    state = torch.load(folder / "own.ckpt", weights_only=True)["state_dict"]
    bias: torch.Tensor = state["decoder.layers.0.mlp.gate.expert_bias"]
    return bias

"""Optimizer states in bf16: held in 2 bytes between steps, in a checkpoint and after a resume; every optimizer steps on them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_5d import FiveD, FiveDPrecision, ZeRO
from tests.modules import TinyLM, batches
from tests.ranks.pool import RankPool
from tests.trainers import quiet, whole
from tests.traps.replicas import TRAINER, one_and_same

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], set[str]]] = {
    "AdamW": (torch.optim.AdamW, {}, {"exp_avg", "exp_avg_sq"}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}, {"exp_avg", "exp_avg_sq"}),
    "AMSGrad": (torch.optim.Adam, {"amsgrad": True}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}, {"momentum_buffer"}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9}, {"square_avg", "momentum_buffer"}),
    "Adagrad": (torch.optim.Adagrad, {}, {"sum"}),
    "NAdam": (torch.optim.NAdam, {}, {"exp_avg", "exp_avg_sq"}),
}


class With(TinyLM):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def configure_optimizers(self) -> Any:
        kind, arguments, _ = OPTIMIZERS[self.name]
        return kind(self.parameters(), lr=1e-2, **arguments)


def _fit(name: str, stage: int, precision: str, dtype: Any, ckpt: str | None = None, epochs: int = 1) -> Any:
    module = With(name)
    trainer = quiet(
        strategy=FiveD(ZeRO(stage=stage)),
        devices=2,
        plugins=FiveDPrecision(precision, optimizer_state_dtype=dtype),
        use_distributed_sampler=False,
        max_epochs=epochs,
    )
    trainer.fit(module, DataLoader(batches(3), batch_size=None), ckpt_path=ckpt)  # type: ignore[arg-type]
    return trainer, whole(module)


def _held(trainer: Any) -> tuple[set[tuple[str, torch.dtype]], set[torch.dtype]]:
    entries = [entry for state in trainer.optimizers[0].state.values() for entry in state.items()]
    return {(k, v.dtype) for k, v in entries if k != "step"}, {v.dtype for k, v in entries if k == "step"}


def _kinds(rank: int) -> list[Any]:
    found = []
    for name in OPTIMIZERS:
        for stage, precision in ((0, "32-true"), (3, "bf16-mixed")):
            wide, right = _fit(name, stage, precision, None)
            narrow, weights = _fit(name, stage, precision, "bfloat16")
            worst = max(float((weights[n] - right[n]).abs().max()) for n in right)
            found.append((name, _held(wide), _held(narrow), worst))
    return found


def test_every_optimizer_keeps_its_states_in_bf16(ranks: RankPool) -> None:
    for name, wide, narrow, worst in one_and_same(ranks(2, _kinds, **TRAINER)):
        keys = OPTIMIZERS[name][2]
        assert {pair for pair in wide[0] if pair[0] in keys} == {(key, torch.float32) for key in keys}
        assert {pair for pair in narrow[0] if pair[0] in keys} == {(key, torch.bfloat16) for key in keys}
        assert narrow[1] <= {torch.float32}
        assert 0 < worst < 5e-3, name  # steps are of 1e-2


def _resumed(rank: int, folder: str) -> tuple[Any, Any, bool]:
    path = f"{folder}/run.ckpt"
    trainer, _ = _fit("AdamW", 1, "bf16-mixed", torch.bfloat16)
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["optimizer_states"][0]["state"]
    dtypes = {value.dtype for state in saved.values() for key, value in state.items() if key != "step"}
    held = []

    module = With("AdamW")
    module.on_train_start = lambda: held.append(_held(module.trainer))  # type: ignore[method-assign]
    again = quiet(
        strategy=FiveD(ZeRO(stage=1)),
        devices=2,
        plugins=FiveDPrecision("bf16-mixed", optimizer_state_dtype=torch.bfloat16),
        use_distributed_sampler=False,
        max_epochs=2,
    )
    again.fit(module, DataLoader(batches(3), batch_size=None), ckpt_path=path)  # type: ignore[arg-type]
    _, straight = _fit("AdamW", 1, "bf16-mixed", torch.bfloat16, epochs=2)
    same = all(torch.equal(value, straight[name]) for name, value in whole(module).items())
    return dtypes, held[0][0], same


def test_a_resume_goes_on_in_bf16_bit_for_bit(ranks: RankPool, tmp_path: Path) -> None:
    dtypes, held, same = one_and_same(ranks(2, _resumed, str(tmp_path), **TRAINER))
    assert dtypes == {torch.bfloat16}
    assert {dtype for _, dtype in held} == {torch.bfloat16}
    assert same


def test_another_dtype_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="16-bit"):
        FiveDPrecision(optimizer_state_dtype=torch.int8)

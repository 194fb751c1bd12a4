"""Names for ``Trainer(strategy="…")``."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lightning_5d.data_parallel.zero import ZeRO
from lightning_5d.strategy import FiveD


def register_strategies() -> None:
    """Registers ``"fived"`` and ``"fived_zero1"``, ``"fived_zero2"``, ``"fived_zero3"``; importing the package calls it."""
    names = {"fived": 0, "fived_zero1": 1, "fived_zero2": 2, "fived_zero3": 3}
    for name, stage in names.items():
        StrategyRegistry.register(
            name,
            _make,
            description=f"FiveD with data parallel ranks, ZeRO stage {stage}",
            override=True,
            stage=stage,
        )


def _make(stage: int) -> FiveD:
    return FiveD(ZeRO(stage=stage))

"""Lightning's model summary, of the whole module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelSummary
from lightning.pytorch.utilities.model_summary import summarize

from lightning_5d.initialization import meta_tensors


@dataclass(frozen=True)
class _Found:
    """What `ModelSummary` reads from Lightning's summary of a module (2.6)."""

    arrays: list[tuple[str, list[str]]]
    total_parameters: int
    trainable_parameters: int
    model_size: float
    total_training_modes: Mapping[str, int]
    total_flops: int

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        return self.arrays


class WholeSummaries:
    """Summaries of a module as it was before it was cut, for callbacks that show them afterwards.

    Lightning counts what it finds when training begins. By then a rank may hold one stage of a pipeline, and weights may be
    stored with padding, or parts of them twice.

    Args:
        module: The whole module.
        callbacks: Those of the Trainer.
    """

    def __init__(self, module: pl.LightningModule, callbacks: Iterable[Callback]) -> None:
        self._found: dict[int, _Found] = {}
        if module.example_input_array is not None and meta_tensors(module):
            return  # Lightning would run it on the example
        for depth in {callback._max_depth for callback in callbacks if isinstance(callback, ModelSummary)} - {0}:
            summary: Any = summarize(module, max_depth=depth)
            self._found[depth] = _Found(
                summary._get_summary_data(),
                summary.total_parameters,
                summary.trainable_parameters,
                summary.model_size,
                summary.total_training_modes,
                summary.total_flops,
            )

    def hand_out(self, callbacks: Iterable[Callback]) -> None:
        """Lets callbacks show them the next time."""
        for callback in callbacks:
            if isinstance(callback, ModelSummary) and callback._max_depth in self._found:
                _show_once(callback, self._found[callback._max_depth])


def _show_once(callback: ModelSummary, found: _Found) -> None:
    def summary(trainer: pl.Trainer, pl_module: pl.LightningModule) -> Any:
        del callback.__dict__["_summary"]
        return found

    callback.__dict__["_summary"] = summary

"""A picture of the loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.utilities import rank_zero_only
from matplotlib.figure import Figure
from torch import Tensor
from typing_extensions import override

from lightning_5d.data.corpus import Corpus

Curve = list[tuple[int, float]]


class LossPlot(L.Callback):
    """Draws `train_loss` and `val_loss` over the optimizer steps into a PNG at the end of training.

    The unit is bits per byte where the data module knows how many bytes a token stands for, else bits per token; the
    entropy of the training tokens' frequencies is drawn as the line that any model has to get below.

    Args:
        path: The picture.
        title: Its title.
    """

    def __init__(self, path: str | Path, title: str = "Loss") -> None:
        self.path = Path(path)
        self.title = title
        self._train: list[tuple[int, Tensor]] = []
        self._val: list[tuple[int, Tensor]] = []

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the training loss."""
        self._keep(self._train, trainer, "train_loss")

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the validation loss."""
        if not trainer.sanity_checking:
            self._keep(self._val, trainer, "val_loss")

    @override
    @rank_zero_only
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw."""
        data = getattr(trainer, "datamodule", None)
        corpus = data if isinstance(data, Corpus) else None
        bytes_per_token = corpus.bytes_per_token if corpus else None
        scale = 1 / (math.log(2) * (bytes_per_token or 1.0))
        floor = corpus.unigram_entropy() / (bytes_per_token or 1.0) if corpus else None
        figure = draw_losses(
            [(step, float(value) * scale) for step, value in self._train],
            [(step, float(value) * scale) for step, value in self._val],
            unigram=floor,
            unit="bits per byte" if bytes_per_token else "bits per token",
            title=self.title,
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(self.path, dpi=150)

    @staticmethod
    def _keep(curve: list[tuple[int, Tensor]], trainer: L.Trainer, key: str) -> None:
        # As tensors: reading the number here would make the host wait for the accelerator at every step.
        if key in trainer.callback_metrics:
            curve.append((trainer.global_step, trainer.callback_metrics[key].detach().clone()))


def draw_losses(train: Curve, val: Curve, *, unigram: float | None, unit: str, title: str) -> Figure:
    """Training loss (each step, and smoothed), validation loss and the unigram entropy over optimizer steps."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, color="tab:blue", alpha=0.35, linewidth=0.8)
        axes.plot(
            steps, _smooth(losses), color="tab:blue", linewidth=1.6, label="training (smoothed; faint: each step)"
        )
    if val:
        axes.plot(
            *zip(*val, strict=True),
            color="tab:orange",
            marker="o",
            markersize=4,
            label=f"validation, at last {val[-1][1]:.2f}",
        )
    if unigram is not None:
        axes.axhline(
            unigram, color="0.3", linestyle="--", linewidth=1.2, label=f"unigram entropy of the text, {unigram:.2f}"
        )
    axes.set(title=title, xlabel="optimizer step", ylabel=f"loss in {unit}")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _smooth(values: tuple[float, ...], weight: float = 0.8) -> list[float]:
    """Exponential mean without the bias of its first values."""
    smoothed, mean = [], 0.0
    for number, value in enumerate(values, start=1):
        mean = weight * mean + (1 - weight) * value
        smoothed.append(mean / (1 - weight**number))
    return smoothed

"""`fived train`: build what the configuration names, fit, and say what came out."""

from __future__ import annotations

import math
from pathlib import Path

import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig

from lightning_5d.callbacks import ExpertLoad, LossPlot, MemoryProfiler, PipelineTrace, TextSample
from lightning_5d.cli.build import build_run
from lightning_5d.data.corpus import Corpus


def train(config: DictConfig) -> float | None:
    """Run one training job.

    Args:
        config: What `conf/train.yaml` describes, resolved.

    Returns:
        The last validation loss, for sweeps that look for the best one; None when nothing was validated.

    Raises:
        ImpossibleRunError: If the configuration cannot run.
    """
    L.seed_everything(config.seed, workers=True, verbose=False)
    run = build_run(config)
    data, trainer = run.data, run.trainer
    trainer.fit(run.model, datamodule=data, ckpt_path=config.ckpt_path)
    if trainer.is_global_zero:
        print("\n" + "\n".join(_report(trainer, data, Path(config.output_dir))))
    loss = trainer.callback_metrics.get("val_loss")
    return None if loss is None else float(loss)


def _report(trainer: L.Trainer, data: L.LightningDataModule, folder: Path) -> list[str]:
    lines = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, TextSample) and callback.text is not None:
            lines += [f"--- {callback.tokens} tokens sampled after {callback.prompt!r}", callback.text, "---", ""]
    if isinstance(data, Corpus):
        bytes_per_token = data.bytes_per_token
        unit = "bits per byte" if bytes_per_token else "bits per token"
        scale = bytes_per_token or 1.0
        lines.append(f"Unigram entropy of the training text:  {data.unigram_entropy() / scale:.3f} {unit}")
        if "val_loss" in trainer.callback_metrics:
            bits = float(trainer.callback_metrics["val_loss"]) / math.log(2) / scale
            lines.append(f"Validation loss after {trainer.global_step} steps:".ljust(39) + f"{bits:.3f} {unit}")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint) and callback.best_model_path:
            lines.append(f"Best checkpoint:  {callback.best_model_path}")
        if isinstance(callback, MemoryProfiler) and callback.files:
            lines.append(f"Memory, charts:   {callback.folder}")
        if isinstance(callback, PipelineTrace) and callback.trace is not None:
            actual, planned = callback.trace.actual, callback.trace.planned
            lines.append(f"Pipeline, bubble: {actual.bubble_ratio:.1%} measured, {planned.bubble_ratio:.1%} planned")
            lines += [f"Pipeline, chart:  {file}" for file in callback.files if file.suffix in (".png", ".html")]
        if isinstance(callback, ExpertLoad) and callback.files:
            lines += [f"Experts, chart:   {file}" for file in callback.files if file.suffix == ".png"]
        if isinstance(callback, LossPlot):
            lines.append(f"Plot of the loss: {callback.path}")
    lines.append(f"Run folder:       {folder}")
    return lines

"""The progress bar."""

from __future__ import annotations

import lightning.pytorch as L
from lightning.pytorch.callbacks import TQDMProgressBar
from typing_extensions import override


class Progress(TQDMProgressBar):
    """Lightning's bar without the logger's version, which says nothing here.

    tqdm rather than Rich: it also reads well when the output goes to a file.
    """

    @override
    def get_metrics(
        self, trainer: L.Trainer, pl_module: L.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """What stands at the end of the bar."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics

"""Tokens per second while training."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as L
from torch import Tensor
from typing_extensions import override


class Throughput(L.Callback):
    """Logs `tokens_per_second`, over all data ranks, as a mean over the last `window` batches.

    The time between batches counts, validation and its way in and out do not.

    Args:
        window: How many batches the mean is taken over.
        key: The entry of the batch, of shape (B, T), that holds the tokens.
    """

    def __init__(self, window: int = 20, key: str = "input_ids") -> None:
        self.key = key
        self._history: deque[tuple[float, int]] = deque(maxlen=window)
        self._since: float | None = None

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock, unless it runs since the batch before."""
        if self._since is None:
            self._since = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the batch and log the mean."""
        now = time.perf_counter()
        if self._since is not None:
            self._history.append((now - self._since, self._tokens(batch)))
        self._since = now
        seconds = sum(duration for duration, _ in self._history)
        if seconds > 0:
            data_ranks = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
            tokens = data_ranks * sum(count for _, count in self._history)
            # One rank's clock: they move in step, and a reduction at every batch would cost what it measures.
            pl_module.log("tokens_per_second", tokens / seconds, prog_bar=True, rank_zero_only=True)

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave out the time since the batch before; the clock starts again with the next one."""
        self._since = None

    def _tokens(self, batch: Any) -> int:
        tokens = batch.get(self.key) if isinstance(batch, Mapping) else None
        return tokens.numel() if isinstance(tokens, Tensor) else 0

"""Where the memory of a training step goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_5d.memory.charts import draw_rank, draw_summary
from lightning_5d.memory.holders import elsewhere, held, pools
from lightning_5d.memory.recorder import MemoryRecorder
from lightning_5d.memory.summary import MemorySummary
from lightning_5d.names import class_name


class MemoryProfiler(L.Callback):
    """Records bytes by category (weights, gradients, …) through the phases of the first steps, on every rank.

    Each rank writes ``memory_rankN.csv``, ``.json``, ``.png`` and ``.html``; rank 0 adds ``memory_summary.json``, ``.png`` and
    ``.html`` with all ranks side by side, prints the peaks and gives them to the loggers as ``memory_peak_MiB/CATEGORY``.
    CSV and JSON are written after every recorded step and when the run fails, the pictures at the end. Outside the
    recorded steps nothing is installed.

    Phases are ``setup`` (from here to the first batch: what `configure_model` builds is in it), ``gather`` (before the user's
    step: ZeRO stages 1 and 2 gather weights), ``forward``, ``backward``, ``clip``, ``step``, ``between`` batches and
    ``evaluation``. Works under any strategy; what axes of `FiveD` keep outside the module is asked of them.

    Args:
        folder: For the files; ``memory`` in the Trainer's log folder if None.
        steps: How many optimizer steps to record, skipped ones included.
        start: Number of the first one, from 1. Recording sees the model being built only if this is 1.
        resolution: How many points of a phase are kept at most; the highest moments are among them.
        snapshot: On CUDA, also keep the allocator's history as ``memory_rankN.pickle`` for torch's own viewer.
        pictures: Whether to draw; `python -m lightning_5d.memory FOLDER` can do it later.
        title: Of the charts; the model and the strategy if None.

    Raises:
        ValueError: If ``steps``, ``start`` or ``resolution`` is not a whole number of at least 1.
    """

    leaves_gradients_alone = True

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        steps: int = 4,
        start: int = 1,
        resolution: int = 48,
        snapshot: bool = True,
        pictures: bool = True,
        title: str | None = None,
    ) -> None:
        for name, value in (("steps", steps), ("start", start), ("resolution", resolution)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"MemoryProfiler({name}={value!r}) is not a whole number of at least 1; use 1 or more."
                )
        self.folder = None if folder is None else Path(folder)
        self.steps, self.start, self.resolution = steps, start, resolution
        self.snapshot, self.pictures, self.title = snapshot, pictures, title
        self.recorder: MemoryRecorder | None = None
        self.summary: MemorySummary | None = None
        self.files: list[Path] = []
        self._step = self._batch = 0
        self._stepped = False
        self._drawn = True
        self._wrapped: dict[str, Any] = {}

    @property
    @override
    def state_key(self) -> str:
        return f"MemoryProfiler[{self.start},{self.steps}]"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "batch": self._batch}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._step, self._batch = state_dict["step"], state_dict["batch"]

    # The run

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Start, if the first step is to be recorded: the model may not be built yet."""
        if stage != "fit":
            return
        if self.folder is None:
            self.folder = Path(trainer.log_dir or trainer.default_root_dir) / "memory"
        self.title = self.title or f"{class_name(pl_module)}, {type(trainer.strategy).__name__}"
        if self._step < self.start == 1:
            self._begin_recording(trainer, pl_module)
            self._phase("setup")

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Drop what was recorded if a checkpoint says that these steps are over."""
        if self._live and self._step >= self._stop:
            self._end_recording(pl_module)
            self.recorder = None
            self._drawn = True

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """A batch begins."""
        self._batch += 1
        self._stepped = False
        if self.recorder is not None and not self.recorder.recording and not self.recorder.removed:
            self.recorder.stop()  # somebody's dispatch mode lay above it
        if self.recorder is None and self.start <= self._step + 1 <= self._stop:
            self._begin_recording(trainer, pl_module)
        if self._live:
            self._digest()
            self._phase("gather", self._step + 1)

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        """Forward is over; parameters that backward will need exist by now."""
        if self._live and self.recorder is not None:
            self.recorder.claim()
            self.recorder.watch_gradients()
            self._phase("backward", self._step + 1)

    @override
    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gradients are there."""
        if self._live and self.recorder is not None:
            self.recorder.claim()
            if not pl_module.automatic_optimization:  # the user's step goes on
                self._phase("forward", self._step + 1)

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Gradients are final."""
        self._stepped = True
        if self._live and self.recorder is not None:
            self.recorder.claim()
            self._phase("clip" if pl_module.automatic_optimization else "step", self._step + 1)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch is over, and perhaps an optimizer step, and perhaps the last one to record."""
        if self._live and self.recorder is not None:
            self.recorder.claim()
            self._phase("between", self._step + 1)
        if self._stepped:
            self._step += 1
        if self._live and self._step >= self._stop:
            self._finish(trainer, pl_module, everyone=True)

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluation begins."""
        self._phase("evaluation", self._step)

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluation is over."""
        self._phase("between" if self._step else "setup", self._step)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Finish a run that was shorter than the window, and draw."""
        if self._live:
            self._finish(trainer, pl_module, everyone=True)
        self._draw()

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Keep what there is; other ranks may be in another place, so nobody is waited for."""
        if self.recorder is not None and not self._drawn:
            self.recorder.record.failure = f"{type(exception).__name__}: {exception}"
            self._finish(trainer, pl_module, everyone=False)
            self._draw()

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Whatever has not been written yet."""
        if self.recorder is not None and not self._drawn:
            self._finish(trainer, pl_module, everyone=False)
            self._draw()

    # Recording

    @property
    def _live(self) -> bool:
        return self.recorder is not None and self.recorder.recording

    @property
    def _stop(self) -> int:
        """The last step to record."""
        return self.start + self.steps - 1

    def _phase(self, name: str, step: int = 0) -> None:
        if self.recorder is not None and self.recorder.recording:
            self.recorder.begin(name, step, self._batch)

    def _begin_recording(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        device, strategy = trainer.strategy.root_device, trainer.strategy

        def axes() -> Any:
            return getattr(strategy, "parallelized", ())

        self.recorder = MemoryRecorder(
            device,
            lambda: held(module, strategy.optimizers, axes()),
            lambda: pools(axes(), device.type),
            lambda: elsewhere(axes(), device.type),
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            resolution=self.resolution,
            snapshot=self.snapshot,
        )
        self.recorder.claim()
        self._drawn = False
        self._wrap(module, "training_step", before="forward")
        self._wrap(module, "configure_gradient_clipping", after="step")

    def _end_recording(self, module: L.LightningModule) -> None:
        if self.recorder is not None:
            self.recorder.stop()
        for name, before in self._wrapped.items():
            if before is None:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = before
        self._wrapped.clear()

    def _wrap(self, module: L.LightningModule, name: str, *, before: str = "", after: str = "") -> None:
        """Lets a method of the module mark a phase: Lightning has no hook at these two places."""
        method: Callable[..., Any] = getattr(module, name)

        @wraps(method)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if before:
                self._phase(before, self._step + 1)
            try:
                return method(*args, **kwargs)
            finally:
                if after:
                    self._phase(after, self._step + 1)

        self._wrapped[name] = module.__dict__.get(name)
        module.__dict__[name] = marked

    def _digest(self) -> None:
        if self.recorder is not None and self.folder is not None:
            self.recorder.digest()
            if self.recorder.record.phases:
                self.files = self.recorder.record.save(self.folder)

    # The end

    def _finish(self, trainer: L.Trainer, module: L.LightningModule, *, everyone: bool) -> None:
        if self.recorder is None or self.folder is None:
            return
        if self._live:
            self._digest()
            self._end_recording(module)
        record = self.recorder.record
        self.files = record.save(self.folder)
        snapshot = self.recorder.allocator.save(self.folder / f"memory_rank{record.rank}.pickle")
        if snapshot is not None:
            self.files.append(snapshot)
        own = MemorySummary.of(record)
        if everyone and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, own)
            own = MemorySummary.together(parts)
        self.summary = own
        if everyone and trainer.is_global_zero:
            self.files.append(own.save(self.folder))
            rank_zero_info(own.text())
            metrics: Mapping[str, float] = own.metrics()
            for logger in trainer.loggers:
                logger.log_metrics(dict(metrics), step=trainer.global_step)

    def _draw(self) -> None:
        if self._drawn or self.recorder is None or self.folder is None:
            return
        self._drawn = True
        if not self.pictures:
            return
        record = self.recorder.record
        if record.phases:
            self.files += draw_rank(record, self.folder, self.title or "Memory")
        if self.summary is not None and record.rank == 0 and record.failure is None:
            self.files += draw_summary(self.summary, self.folder, self.title or "Memory")

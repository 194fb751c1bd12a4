"""What a pipeline really did in a step, beside what was planned."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_5d.mesh import DATA_AXES, ParallelMesh
from lightning_5d.pipeline_parallel.schedule import Schedule
from lightning_5d.pipeline_parallel.trace import Event, Recorder, StepTrace
from lightning_5d.pipeline_parallel.trace.clock import SharedClock, shared_clock
from lightning_5d.pipeline_parallel.trace.files import describe, draw_trace, write_data


@runtime_checkable
class Traced(Protocol):
    """A pipeline at work whose executor tells a recorder what it does.

    Attributes:
        recorder: Who is told; nobody if ``None``.
        schedule: That of the last step that was run.
        rank: This rank's place in the pipeline.
        mesh: The ranks by axis.
    """

    recorder: Recorder | None

    @property
    def schedule(self) -> Schedule:  # noqa: D102
        ...

    @property
    def rank(self) -> int:  # noqa: D102
        ...

    @property
    def mesh(self) -> ParallelMesh:  # noqa: D102
        ...


def pipeline_of(trainer: L.Trainer) -> Traced | None:
    """The pipeline at work in a trainer, if there is one."""
    axes = getattr(trainer.strategy, "parallelized", ())
    return next((applied for applied in axes if isinstance(applied, Traced)), None)


class PipelineTrace(L.Callback):
    """Records chosen optimizer steps of a pipeline: what each rank computed, sent and waited for, and when.

    For each of them it writes ``stepNNNNNN.json`` (everything; `StepTrace.load` reads it), ``.chrome.json`` (for
    ``chrome://tracing`` and ui.perfetto.dev), and one ``.png`` and one self-contained ``.html`` with the planned step above the actual
    one on one clock. It logs ``pipeline/bubble``, the share of all ranks' time in which they computed nothing (and
    ``pipeline/bubble_planned``, what the schedule comes to with each stage's mean times): the same numbers on all ranks, means over
    the data ranks. Where batches are accumulated, a step's last batch is the one that is recorded.

    Outside these steps nothing is recorded. In them, an event costs about a microsecond on CPU; accelerators are waited for after the
    step. Pictures are drawn after the last of several steps in a row, as drawing takes a second or two.

    Args:
        steps: Numbers of the steps, from 1; the first ones also agree on shapes and warm up.
        every: Besides these, each step that this number divides.
        folder: For the files; ``pipeline`` in the Trainer's log folder if ``None``.
        data_ranks: Whose pipelines are written: that of data rank 0 (``"first"``), or each (``"all"``).
        png: Whether to draw the picture.
        html: Whether to write the page.
        chrome: Whether to write the trace for Chrome and Perfetto.

    Attributes:
        trace: The last recorded step; on the ranks that write.
        summaries: A line for each recorded step, measured and planned; on the ranks that write.
        files: What this rank has written.

    Raises:
        MisconfigurationException: With every setting that does not work.
    """

    leaves_gradients_alone = True

    def __init__(
        self,
        steps: int | Collection[int] = (4,),
        *,
        every: int | None = None,
        folder: str | Path | None = None,
        data_ranks: Literal["first", "all"] = "first",
        png: bool = True,
        html: bool = True,
        chrome: bool = True,
    ) -> None:
        chosen = (steps,) if isinstance(steps, int) else tuple(steps)
        wrong = [
            f"steps has {step!r}; steps are counted from 1."
            for step in chosen
            if not isinstance(step, int) or isinstance(step, bool) or step < 1
        ]
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            wrong.append(f"every={every!r} must be a whole number of at least 1, or None.")
        if not chosen and every is None:
            wrong.append("there is no step to record; give steps=(4,) or every=100.")
        if data_ranks not in ("first", "all"):
            wrong.append(f'data_ranks={data_ranks!r} is unknown; use "first" or "all".')
        if wrong:
            raise MisconfigurationException("PipelineTrace: " + " ".join(wrong))
        self.steps, self.every = frozenset(chosen), every
        self.folder = None if folder is None else Path(folder)
        self.data_ranks: Literal["first", "all"] = data_ranks
        self.png, self.html, self.chrome = png, html, chrome
        self.files: list[Path] = []
        self.trace: StepTrace | None = None
        self.summaries: list[str] = []
        self._undrawn: list[StepTrace] = []
        self._pipeline: Traced | None = None
        self._step: int | None = None
        self._stepped = False
        self._clock: SharedClock | None = None

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the pipeline."""
        self._pipeline = pipeline_of(trainer)
        self._clock = None
        if self.folder is None:
            self.folder = Path(trainer.log_dir or trainer.default_root_dir) / "pipeline"
        if self._pipeline is None:
            rank_zero_warn(
                "PipelineTrace records nothing: there is no pipeline at work. Train with FiveD(PipelineParallel(...)), or leave the"
                " callback out."
            )

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin to record, if this batch belongs to a chosen step."""
        self._stepped = False
        step = trainer.global_step + 1
        if self._pipeline is not None and self._wanted(step):
            self._step = step
            self._pipeline.recorder = Recorder(trainer.strategy.root_device)

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """This batch is the last one of its step."""
        self._stepped = True

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Bring together what the ranks recorded, log and write it."""
        pipeline, step = self._pipeline, self._step
        if pipeline is None or step is None or pipeline.recorder is None:
            return
        recorder, pipeline.recorder, self._step = pipeline.recorder, None, None
        if not self._stepped:
            return
        trace = self._together(step, recorder.take(), pipeline, trainer.strategy.root_device)
        self._log(trace, trainer, pl_module)
        if self._writes(pipeline):
            self.trace = trace
            self.summaries.append(describe(trace))
            self._undrawn.append(trace)
            self.files += write_data(trace, self._folder, chrome=self.chrome)
        if not self._wanted(step + 1):
            self._draw()

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw what is left, and say what came out."""
        self._draw()
        if self._pipeline is None:
            return
        if self.summaries:
            rank_zero_info(f"Pipeline {self.summaries[-1]}. Charts: {self._folder}")
        elif self._writes(self._pipeline):
            chosen = ", ".join(map(str, sorted(self.steps))) or f"every {self.every}"
            rank_zero_warn(
                f"PipelineTrace recorded nothing: training ended at step {trainer.global_step}, before {chosen}."
            )
        self._pipeline = None

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Record no further, and draw what there is."""
        if self._pipeline is not None:
            self._pipeline.recorder = None
            self._draw()
        self._pipeline = None

    def _wanted(self, step: int) -> bool:
        return step in self.steps or (self.every is not None and step % self.every == 0)

    @property
    def _folder(self) -> Path:
        return self.folder or Path("pipeline")

    def _writes(self, pipeline: Traced) -> bool:
        mesh = pipeline.mesh
        copies = DATA_AXES if self.data_ranks == "first" else ()
        return pipeline.rank == 0 and mesh.rank(*copies, "cp", "tp") == 0

    def _together(self, step: int, events: tuple[Event, ...], pipeline: Traced, device: torch.device) -> StepTrace:
        """The events of all ranks of the pipeline; each of them calls it."""
        mesh = pipeline.mesh
        ranks: list[Any] = [events]
        if mesh.size("pp") > 1:
            group = mesh.group("pp")
            self._clock = shared_clock(group, device)
            ranks = [None] * mesh.size("pp")
            dist.all_gather_object(ranks, [event.later(self._clock.offset) for event in events], group=group)
        error = 0.0 if self._clock is None else self._clock.error
        return StepTrace.of(step, pipeline.schedule, ranks, clock_error=error, data_rank=mesh.rank(*DATA_AXES))

    def _log(self, trace: StepTrace, trainer: L.Trainer, module: L.LightningModule) -> None:
        values = torch.tensor([trace.actual.bubble_ratio, trace.planned.bubble_ratio])
        if trainer.world_size > 1:
            values = values.to(trainer.strategy.root_device)
            dist.all_reduce(values)
            values /= trainer.world_size
        metrics = dict(zip(("pipeline/bubble", "pipeline/bubble_planned"), values.tolist(), strict=True))
        # Loggers get it whether or not this is a step at which the Trainer logs.
        module.log_dict(metrics, logger=False, on_step=True, on_epoch=False)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trace.step - 1)  # Lightning's own are counted from 0

    def _draw(self) -> None:
        while self._undrawn:
            self.files += draw_trace(self._undrawn.pop(0), self._folder, png=self.png, html=self.html)

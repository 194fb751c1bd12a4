"""Parity with one process: the same module, the same batches, once in one process and once under a strategy.

The reference is deliberately not `FiveD`: Lightning's single-device strategy takes all microbatches of a step, of all data
ranks, as one big batch, and runs one backward through their (weighted) mean. What is compared is what training consists of: the
loss of every step, every gradient, the gradient norm that clipping uses, and every parameter after the last step.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from typing_extensions import override

from lightning_5d.checkpoint.full_state import gather
from lightning_5d.comparison import Recording, Row, compare, noise_elements, noise_parameters
from lightning_5d.mesh import DATA_AXES, resolve_sizes
from lightning_5d.plan import ParallelPlan
from lightning_5d.precision import FiveDPrecision
from lightning_5d.reference import OneBigBatch, reference_precision
from lightning_5d.strategy import FiveD

TOLERANCES = {
    "32-true": 1e-5,
    "64-true": 1e-10,
    "bf16-mixed": 2e-2,
    "16-mixed": 5e-3,
    "bf16-true": 5e-2,
    "16-true": 5e-2,
}
"""Largest relative difference that counts as equal, by precision string."""

_Random = nn.modules.dropout._DropoutNd


@dataclass(frozen=True)
class Parity:
    """The result of `verify`.

    Attributes:
        rows: What was compared, the worst of each kind.
        ranks: Number of ranks of the strategy's run.
        steps: Optimizer steps made.
        description: The strategy, for the heading.
        notes: What to know when reading the rows.
    """

    rows: tuple[Row, ...]
    ranks: int
    steps: int
    description: str = ""
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every quantity is within its tolerance."""
        return all(row.passed for row in self.rows)

    def table(self) -> str:
        """The rows as text, with the verdict in the last line."""
        head = ("quantity", "where", "one process", "rel. difference", "tolerance", "")
        lines = [
            (
                r.quantity,
                r.where,
                f"{r.reference:.6g}",
                f"{r.difference:.2e}",
                f"{r.tolerance:.0e}",
                "" if r.passed else "FAIL",
            )
            for r in self.rows
        ]
        widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in [head, *lines]
        ]
        text += [f"note: {note}" for note in self.notes]
        verdict = "pass" if self.passed else "FAIL"
        return "\n".join(
            [*text, f"{verdict}: {self.description} on {self.ranks} ranks against one process, {self.steps} steps"]
        )

    def __str__(self) -> str:
        return self.table()


def verify(
    module: pl.LightningModule,
    batches: Sequence[Any],
    strategy: FiveD | Callable[[], FiveD],
    *,
    devices: int = 2,
    accumulate_grad_batches: int = 1,
    precision: str | FiveDPrecision = "32-true",
    gradient_clip_val: float | None = None,
    accelerator: str = "cpu",
    tolerance: float | None = None,
) -> Parity:
    """Compares a module's training under a strategy with its training in one process.

    The module is copied, so the caller's keeps its weights. Dropout and other random layers draw different numbers in
    different layouts: set them to 0 for this. Called in an ordinary process it starts the ranks itself; called on every rank
    of a running group (torchrun, a test's workers) it uses those, and returns the same result on all of them.

    Args:
        module: Any LightningModule with automatic optimization and one optimizer.
        batches: Microbatches in global order: step by step, within a step by accumulation index, within that by data
            rank. As many steps are made as they allow.
        strategy: What to verify; a function that makes it where the object cannot be shared.
        devices: Number of ranks.
        accumulate_grad_batches: Microbatches per rank and optimizer step.
        precision: Lightning's precision string, or the plugin for options. The reference runs in the same precision: in
            mixed ones from 16-bit copies of its weights, with torch's own gradient scaler in the same settings.
        gradient_clip_val: Bound of the gradient norm, if any.
        accelerator: Lightning's accelerator name.
        tolerance: Largest relative difference that passes; by dtype if ``None`` (`TOLERANCES`).

    Returns:
        The comparison; ``print(result)`` shows it, ``result.passed`` says it.

    Raises:
        MisconfigurationException: If there are too few batches for one step, or manual optimization.
    """
    made = strategy() if callable(strategy) and not isinstance(strategy, FiveD) else strategy
    if made.start_method == "popen":
        made.start_method = "forkserver"  # running the caller's script again would verify again
    sizes, _ = resolve_sizes(devices, made.plugins)
    per_step = math.prod(sizes[axis] for axis in DATA_AXES) * accumulate_grad_batches
    steps = len(batches) // per_step
    if steps < 1:
        raise MisconfigurationException(
            f"{len(batches)} batches are too few: one step takes {per_step // accumulate_grad_batches} data ranks x"
            f" {accumulate_grad_batches} microbatches = {per_step}."
        )
    if not module.automatic_optimization:
        raise MisconfigurationException(
            "verify needs automatic optimization: a manual step decides itself what a step is."
        )
    batches = batches[: steps * per_step]
    plugin = FiveDPrecision(precision) if isinstance(precision, str) else precision.fresh()
    common: dict[str, Any] = {"accelerator": accelerator, "gradient_clip_val": gradient_clip_val}
    with tempfile.TemporaryDirectory() as folder:
        ranks = per_step // accumulate_grad_batches
        expected = _run_reference(copy.deepcopy(module), batches, per_step, common, plugin, made.plan, ranks)
        common["plugins"] = plugin
        found = _run_strategy(
            copy.deepcopy(module), batches, made, devices, accumulate_grad_batches, common, Path(folder)
        )
    limit = TOLERANCES.get(str(plugin.precision), 1e-5) if tolerance is None else tolerance
    notes = []
    overflowed = expected.overflows() & found.overflows()
    if overflowed:
        listed = ", ".join(map(str, sorted(overflowed)))
        notes.append(f"gradients of step {listed} overflowed on both sides, which skipped it: they are not compared")
        if len(overflowed) == steps:
            raise MisconfigurationException(
                f"All {steps} steps overflowed, so there is nothing to compare. Give a smaller scale than"
                f" {plugin.scaler.settings.init_scale if plugin.scaler else 1.0:g}, as in FiveDPrecision(..., loss_scaling="
                "LossScaling(init_scale=1024.0))."
            )
    noise = noise_parameters(expected)
    named = sorted(noise) + [
        f"{int(elements.sum())} elements of {name}"
        for name, elements in sorted(noise_elements(expected, found, limit).items())
        if name not in noise
    ]
    if named:
        listed = ", ".join(named[:5]) + (", …" if len(named) > 5 else "")
        notes.append(
            f"the gradient of {listed} is zero but for rounding, which Adam amplifies: its values are not judged"
        )
    rows = tuple(compare(expected, found, limit))
    random = sorted({type(m).__name__ for m in module.modules() if isinstance(m, _Random) and m.p > 0})
    if random and not all(row.passed for row in rows):
        notes.append(f"{', '.join(random)} draws other numbers in another layout: set p=0 to compare")
    return Parity(rows, devices, steps, repr(made), tuple(notes))


class _Recorder(Callback):
    """Writes down losses, gradients before clipping, their norm, and the last parameters."""

    def __init__(self, path: Path | None = None) -> None:
        self.path, self.recording = path, Recording()
        self._pending: list[tuple[float, float]] = []

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        strategy = trainer.strategy
        grads = {name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None}
        norm = (
            strategy.gradient_norm()
            if isinstance(strategy, FiveD)
            else torch.nn.utils.get_total_norm(list(grads.values()))
        )
        whole = _by_parameter(trainer, grads)
        if trainer.is_global_zero:
            self.recording.gradients.append(whole)
        self.recording.norms.append(float(norm))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = float(outputs["loss"]) * trainer.accumulate_grad_batches  # Lightning has divided it by that
        weight = float(outputs.get("weight", 1.0))
        self._pending.append((loss * weight, weight))
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            total = torch.tensor(self._pending, dtype=torch.float64).sum(0)
            total = trainer.strategy.reduce(total.to(trainer.strategy.root_device), reduce_op="sum")
            self.recording.losses.append(float(total[0] / total[1]))
            self._pending.clear()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        whole = _by_parameter(trainer, dict(pl_module.named_parameters()))
        self.recording.parameters = {name: tensor.detach() for name, tensor in whole.items()}
        if self.path is not None and trainer.is_global_zero:
            torch.save(self.recording.__dict__, self.path)
        trainer.strategy.barrier("verify")


def _by_parameter(trainer: pl.Trainer, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors on rank 0."""
    if isinstance(trainer.strategy, FiveD):
        return trainer.strategy.by_parameter(values)
    found: dict[str, Tensor] = gather(dict(values), keep=True)
    return found


class _Listed(Dataset[Any]):
    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class _Order(Sampler[int]):
    def __init__(self, indices: Sequence[int]) -> None:
        self.indices = indices

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class _Batches(pl.LightningDataModule):
    """Each data rank's microbatches, in order."""

    def __init__(self, batches: Sequence[Any]) -> None:
        super().__init__()
        self._batches = batches

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        place = self.trainer.strategy.distributed_sampler_kwargs  # type: ignore[union-attr]
        mine = list(range(place["rank"], len(self._batches), place["num_replicas"]))
        return DataLoader(_Listed(self._batches), batch_size=None, sampler=_Order(mine))


def _trainer(common: Mapping[str, Any], **arguments: Any) -> pl.Trainer:
    return pl.Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        **{**common, **arguments},
    )


def _run_reference(
    module: pl.LightningModule,
    batches: Sequence[Any],
    per_step: int,
    common: Mapping[str, Any],
    plugin: FiveDPrecision,
    plan: ParallelPlan | None,
    ranks: int,
) -> Recording:
    steps = [list(batches[i : i + per_step]) for i in range(0, len(batches), per_step)]
    recorder = _Recorder()
    found = torch.accelerator.current_accelerator() if common["accelerator"] != "cpu" else None
    device = torch.device("cpu") if found is None else torch.device(found.type, 0)
    trainer = _trainer(
        common,
        strategy=OneBigBatch(device, plugin.dtypes.compute, plan, ranks),
        devices=1,
        callbacks=[recorder],
        **reference_precision(plugin, device),
    )
    trainer.fit(module, DataLoader(_Listed(steps), batch_size=None))
    return recorder.recording


def _run_strategy(
    module: pl.LightningModule,
    batches: Sequence[Any],
    strategy: FiveD,
    devices: int,
    accumulate: int,
    common: Mapping[str, Any],
    folder: Path,
) -> Recording:
    path = folder / "recording.pt"
    recorder = _Recorder(path)
    trainer = _trainer(
        common, strategy=strategy, devices=devices, accumulate_grad_batches=accumulate, callbacks=[recorder]
    )
    trainer.fit(module, datamodule=_Batches(batches))
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        box = [str(path)]
        torch.distributed.broadcast_object_list(box, 0)
        path = Path(box[0])
    recording = Recording(**torch.load(path, weights_only=True))
    trainer.strategy.barrier("verify")
    return recording

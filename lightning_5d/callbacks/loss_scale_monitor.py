"""What the loss scale does: logged, written down, and an end to training that no longer learns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

from lightning_5d.loss_scaling import LossScaler
from lightning_5d.nonfinite import NonfiniteGradient, nonfinite_gradients
from lightning_5d.skipped_steps import LOSS_SCALE
from lightning_5d.strategy import FiveD


class LossScaleMonitor(L.Callback):
    """Logs the loss scale and the steps it leaves out; ends training whose gradients stay infinite.

    Logged after each optimizer step: `loss_scale`, `loss_scale_skips` (in all), `loss_scale_skips_in_a_row`, and
    `loss_scale_skip_rate` (of the steps tried). A summary comes at the end of training. Without `FiveD`, or at a precision
    without loss scaling, the callback does nothing.

    Args:
        max_skips_in_a_row: After so many skipped steps in a row training ends with an error, on all ranks at the same step, that
            names the first parameter (in module order) whose gradient is not finite, and its rank.
        fail_at_floor: Whether it ends so, too, when a step overflows at the smallest scale, which no other can then help.
        path: A file that gets one JSON line per skipped step, from rank 0, at once: ``step`` (optimizer steps tried before),
            ``scale``, ``optimizer``, ``skips``, ``in_a_row`` and ``parameters``, a list of ``name`` and ``ranks``.

    Raises:
        ValueError: If `max_skips_in_a_row` is less than 1.
    """

    def __init__(
        self, max_skips_in_a_row: int = 20, *, fail_at_floor: bool = True, path: str | Path | None = None
    ) -> None:
        if max_skips_in_a_row < 1:
            raise ValueError(f"LossScaleMonitor: max_skips_in_a_row={max_skips_in_a_row} is less than 1.")
        self.max_skips_in_a_row = max_skips_in_a_row
        self.fail_at_floor = fail_at_floor
        self.path = None if path is None else Path(path)
        self._in_a_row: dict[int, int] = {}
        self._longest = 0
        self._logged = 0

    @property
    def in_a_row(self) -> int:
        """Steps skipped since the last one that was not; with several optimizers, of the one that has skipped most."""
        return max(self._in_a_row.values(), default=0)

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Make the file's folder now, so that a path that cannot be written is an error before training."""
        if self.path is not None and _scaler(trainer) is not None and trainer.is_global_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Write an overflow down; end training when there have been too many."""
        scaler, strategy = _scaler(trainer), trainer.strategy
        if scaler is None or not isinstance(strategy, FiveD):
            return
        index = next((i for i, known in enumerate(strategy.optimizers) if known is optimizer), 0)
        self._in_a_row[index] = self._in_a_row.get(index, 0) + 1 if strategy.overflow else 0
        if not strategy.overflow:
            return
        self._longest = max(self._longest, self._in_a_row[index])
        skips = strategy.skipped_steps.by_reason.get(LOSS_SCALE, 0) + 1  # this one is counted after the step
        found = nonfinite_gradients(pl_module, strategy.mesh)
        if self.path is not None and trainer.is_global_zero:
            self._write(
                {
                    "step": strategy.skipped_steps.attempts,
                    "scale": scaler.scale,
                    "optimizer": index,
                    "skips": skips,
                    "in_a_row": self._in_a_row[index],
                    "parameters": [{"name": gradient.name, "ranks": list(gradient.ranks)} for gradient in found],
                }
            )
        at_floor = scaler.at_floor and self.fail_at_floor
        if at_floor or self._in_a_row[index] >= self.max_skips_in_a_row:
            raise MisconfigurationException(self._message(scaler, self._in_a_row[index], skips, at_floor, found))

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log, where this batch ended with an optimizer step."""
        scaler, strategy = _scaler(trainer), trainer.strategy
        if scaler is None or not isinstance(strategy, FiveD):
            return
        steps = strategy.skipped_steps
        if steps.attempts == self._logged:
            return
        self._logged = steps.attempts
        skips = steps.by_reason.get(LOSS_SCALE, 0)
        pl_module.log("loss_scale", scaler.scale)
        pl_module.log("loss_scale_skips", float(skips))
        pl_module.log("loss_scale_skips_in_a_row", float(self.in_a_row))
        pl_module.log("loss_scale_skip_rate", skips / steps.attempts)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Sum up."""
        scaler, strategy = _scaler(trainer), trainer.strategy
        if scaler is None or not isinstance(strategy, FiveD):
            return
        tried, skips = strategy.skipped_steps.attempts, strategy.skipped_steps.by_reason.get(LOSS_SCALE, 0)
        rate = f"{100 * skips / tried:.2g} %" if tried else "none tried"
        where = f"; see {self.path}" if skips and self.path is not None else ""
        rank_zero_info(
            f"Loss scale: {scaler.scale:g} at the end. Overflow left out {skips} of {tried} optimizer steps ({rate}), at most"
            f" {self._longest} in a row{where}."
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        """Counts that the strategy does not keep."""
        return {"in_a_row": {str(index): count for index, count in self._in_a_row.items()}, "longest": self._longest}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with them."""
        self._in_a_row = {int(index): count for index, count in state_dict["in_a_row"].items()}
        self._longest = state_dict["longest"]

    def _write(self, entry: dict[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a") as file:  # closed, and so on its way to the disk, before anything else happens
                file.write(json.dumps(entry) + "\n")

    def _message(
        self, scaler: LossScaler, in_a_row: int, skips: int, at_floor: bool, found: Sequence[NonfiniteGradient]
    ) -> str:
        why = (
            f"at the smallest loss scale, {scaler.settings.min_scale:g}"
            if at_floor
            else f"the limit is max_skips_in_a_row={self.max_skips_in_a_row}, and the loss scale is down to {scaler.scale:g}"
        )
        first = f" The first parameter whose gradient is not finite is {found[0]}" if found else ""
        more = f", one of {len(found)}." if len(found) > 1 else "." if found else ""
        return (
            f"Gradients were not finite in {in_a_row} optimizer step{'s' if in_a_row > 1 else ''} in a row ({why}; {skips} skipped"
            f" in all), so nothing is learnt any more.{first}{more} Look for what makes its loss or activations infinite in fp16,"
            " lower the learning rate, or use bf16-mixed, which needs no loss scale."
        )


def _scaler(trainer: L.Trainer) -> LossScaler | None:
    strategy = trainer.strategy
    return strategy.precision_plugin.scaler if isinstance(strategy, FiveD) else None

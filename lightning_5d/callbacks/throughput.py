"""How fast a run trains: tokens, samples, the parts of a step, and the share of the device's peak."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_5d.callbacks.step_clock import Moment, TrainedBatch, samples_and_tokens, shapes
from lightning_5d.model_flops import ModelFlops, peak_flops
from lightning_5d.strategy import FiveD

_MOST_SHAPES = 8
"""Shapes of batches that are counted one by one; others are taken in proportion to their tokens."""


class Throughput(L.Callback):
    """Logs how fast a run trains, as a mean over the last `window` batches.

    | name | what |
    |---|---|
    | `tokens_per_second`, `samples_per_second` | over all data ranks, each batch once; tokens that an attention mask hides do not count |
    | `step_seconds` | one optimizer step, all of its microbatches |
    | `data_seconds` | of these, between batches: loading, moving to the device, other callbacks (by the host's clock) |
    | `forward_backward_seconds` | from a batch's arrival to its complete gradients |
    | `optimizer_seconds` | clipping, the step, the learning rate |
    | `model_tflops_per_second` | 10^12 floating-point operations that the model needs, over all ranks; none that are done again |
    | `mfu` | the same as a share of the peak of all devices |

    Validation, the first batches, and batches in which operations are counted are left out. The parts of a step are left out
    under manual optimization, the operations in compiled modules, `mfu` where the peak is not known: on CPU, unless it is given.
    An accelerator is waited for only when something is logged.

    Args:
        window: How many batches the mean is taken over.
        key: The entry of the batch, of shape (B, T), that holds the tokens. In a batch without names it is the first
            tensor of integers.
        mask: The entry of the same shape that is zero at padding.
        every: Log after each so many batches, and after the last one; the Trainer's `log_every_n_steps` if ``None``.
        warmup: Batches at the beginning that are left out.
        flops_per_token: Operations of the model for one token, forward and backward; counted if ``None``.
        peak: Operations per second of one device; looked up by its name and the precision if ``None``.

    Raises:
        MisconfigurationException: With every setting that does not work.
    """

    leaves_gradients_alone = True

    def __init__(
        self,
        window: int = 20,
        key: str = "input_ids",
        *,
        mask: str = "attention_mask",
        every: int | None = None,
        warmup: int = 1,
        flops_per_token: float | None = None,
        peak: float | None = None,
    ) -> None:
        bounds = {"window": (window, 1), "every": (every, 1), "warmup": (warmup, 0)}
        wrong = [
            f"{name}={value} must be at least {least}."
            for name, (value, least) in bounds.items()
            if value is not None and value < least
        ]
        rates = {"flops_per_token": flops_per_token, "peak": peak}
        wrong += [
            f"{name}={value} must be above 0." for name, value in rates.items() if value is not None and value <= 0
        ]
        if wrong:
            raise MisconfigurationException("Throughput: " + " ".join(wrong))
        self.key, self.mask, self.every, self.warmup = key, mask, every, warmup
        self.flops_per_token, self.peak = flops_per_token, peak
        self.totals = {"tokens": 0.0, "samples": 0.0, "model_flops": 0.0}
        self._history: deque[TrainedBatch] = deque(maxlen=window)
        self._unsettled: list[TrainedBatch] = []
        self._counted: dict[tuple[tuple[int, ...], ...], float] = {}
        self._counter: ModelFlops | None = None
        self._undo: Callable[[], None] | None = None
        self._begin()

    @override
    def state_dict(self) -> dict[str, Any]:
        """What the run has trained on so far, over all ranks."""
        # No collective here: somebody may save on one rank only. Other ranks usually have as much as this one.
        pending = self._amounts(self._unsettled) * self._world
        return {
            "totals": {
                name: total + float(more) for (name, total), more in zip(self.totals.items(), pending, strict=True)
            }
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.totals.update(state_dict["totals"])

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start anew: another run may be on another device."""
        self._begin()
        self._device, self._world = trainer.strategy.root_device, trainer.world_size
        data_ranks = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", self._world)
        # Ranks that hold the same batch share it, so that a sum over all ranks has it once.
        self._share = data_ranks / self._world
        self._may_count = self.flops_per_token is None and not any(
            isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
            for module in pl_module.modules()
        )
        if self.peak is None and (self._may_count or self.flops_per_token is not None):
            self._peak = peak_flops(self._device, _compute_dtype(str(trainer.precision)))

    def _begin(self) -> None:
        self._device, self._world, self._share, self._peak = torch.device("cpu"), 1, 1.0, self.peak
        self._history.clear()
        self._unsettled.clear()
        self._number, self._steps, self._may_count = 0, 0, False
        self._start: Moment | None = None
        self._ready: Moment | None = None
        self._end: Moment | None = None

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """A batch has come."""
        self._start, self._ready, self._steps = Moment(self._device), None, trainer.global_step
        # Not in the very first batch: selective recomputation runs blocks once more in it, to measure them.
        new = self._number > 0 and len(self._counted) < _MOST_SHAPES and shapes(batch) not in self._counted
        if self._may_count and new:
            self._counter = ModelFlops()
            strategy = trainer.strategy
            shares = strategy.shares_of_work() if isinstance(strategy, FiveD) else {}
            self._undo = _count_in_step(pl_module, self._counter, shares)

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        """A backward inside a step, under manual optimization, is known from its forward."""
        if self._counter is not None:
            self._counter.paused = True

    @override
    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Another forward may follow."""
        if self._counter is not None:
            self._counter.paused = False

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Gradients are complete."""
        self._ready = Moment(self._device)

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Nothing may go on counting."""
        self._stop_counting()
        self._counter = None

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let go of what belongs to the device."""
        self._begin()

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave out the time since the batch before; the clock starts again with the next one."""
        self._end = None

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the batch, and log if it is time."""
        self._stop_counting()
        if self._counter is not None:
            self._counted[shapes(batch)] = self._counter.total
        now = Moment(self._device)
        samples, tokens = samples_and_tokens(batch, self.key, self.mask)
        trained = TrainedBatch(
            before=self._end,
            start=self._start or now,
            ready=self._ready if pl_module.automatic_optimization else None,
            end=now,
            stepped=trainer.global_step > self._steps,
            samples=samples,
            tokens=tokens,
            flops=self._flops(shapes(batch)),
        )
        self._unsettled.append(trained)
        if self._number >= self.warmup and self._counter is None:
            self._history.append(trained)
        self._number += 1
        self._counter, self._end = None, now
        every = self.every or getattr(trainer, "log_every_n_steps", 0) or 1
        last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch or trainer.global_step == trainer.max_steps
        if self._number % every == 0 or last:
            for name, value in self._settle(pl_module.automatic_optimization).items():
                pl_module.log(name, value, prog_bar=name == "tokens_per_second", rank_zero_only=True)

    def _stop_counting(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _flops(self, batch: Any) -> float | None:
        """Counted operations of a batch of these shapes; those of another one until it has been counted itself."""
        if batch in self._counted:
            return self._counted[batch]
        if self._counted:
            known, flops = next(iter(self._counted.items()))
            return flops * _elements(batch) / max(_elements(known), 1)
        return None

    def _amounts(self, batches: Iterable[TrainedBatch]) -> Tensor:
        """Tokens, samples and operations of this rank's share in these batches."""
        sums = [0.0, 0.0, 0.0]
        for batch in batches:
            batch.tokens = int(batch.tokens)
            sums[0] += batch.tokens * self._share
            sums[1] += batch.samples * self._share
            # What is counted on a rank is its own part of the model; what a person gives is for the whole of it.
            sums[2] += (
                batch.tokens * self.flops_per_token * self._share
                if self.flops_per_token is not None
                else batch.flops or 0.0
            )
        return torch.tensor(sums, dtype=torch.float64)

    def _settle(self, parts: bool) -> dict[str, float]:
        """What to log now; every rank calls it."""
        if self._device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(self._device)
        amounts = torch.cat([self._amounts(self._history), self._amounts(self._unsettled)])
        if dist.is_initialized() and dist.get_world_size() > 1:
            amounts = amounts.to(self._device)
            dist.all_reduce(amounts)
        tokens, samples, flops, *more = amounts.tolist()
        for name, value in zip(self.totals, more, strict=True):
            self.totals[name] += value
        self._unsettled.clear()
        # One rank's clock: they move in step.
        seconds = sum(batch.seconds for batch in self._history)
        steps = sum(batch.stepped for batch in self._history)
        if seconds <= 0:
            return {}
        found = {"samples_per_second": samples / seconds}
        if tokens:
            found["tokens_per_second"] = tokens / seconds
        if steps:
            found["step_seconds"] = seconds / steps
        if steps and parts:
            found["data_seconds"] = sum(batch.data_seconds for batch in self._history) / steps
            found["forward_backward_seconds"] = sum(b.forward_backward_seconds for b in self._history) / steps
            found["optimizer_seconds"] = sum(batch.optimizer_seconds for batch in self._history) / steps
        if flops:
            found["model_tflops_per_second"] = flops / seconds / 1e12
        if flops and self._peak:
            found["mfu"] = flops / seconds / (self._peak * self._world)
        return found


def _count_in_step(
    module: L.LightningModule, counter: ModelFlops, shares: Mapping[nn.Module, float]
) -> Callable[[], None]:
    """Counts in the next calls of `training_step`; returns what ends that.

    Not from one hook to another: modes that other callbacks enter in hooks would be left in the wrong order.
    """
    step, own = module.training_step, module.__dict__.get("training_step")

    @wraps(step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        with counter, counter.shared(shares):
            return step(*args, **kwargs)

    def stop() -> None:
        if module.__dict__.get("training_step") is counted:
            del module.__dict__["training_step"]
            if own is not None:
                module.__dict__["training_step"] = own

    module.__dict__["training_step"] = counted
    return stop


def _compute_dtype(precision: str) -> torch.dtype:
    names = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}
    return names.get(precision.partition("-")[0], torch.float32)


def _elements(batch: tuple[tuple[int, ...], ...]) -> int:
    return sum(math.prod(shape) for shape in batch)

"""Gradient norms: logged, limited, and steps left out because of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_5d.callbacks.norm_history import NormHistory
from lightning_5d.checkpoint.lightning_state import unwrapped
from lightning_5d.gradients import clip_by_norm, global_norms
from lightning_5d.names import plain_name
from lightning_5d.nonfinite import NonfiniteNorms, nonfinite_gradients
from lightning_5d.strategy import FiveD

NONFINITE = "non-finite gradient"
"""The reason under which `FiveD` counts steps left out because the norm was NaN or infinite."""

SPIKE = "gradient spike"
"""The reason under which `FiveD` counts steps left out because the norm was far above the others."""

_ROUNDING = 1e-6
"""By how much, relatively, a norm has to be above its limit for its step to be counted as clipped."""

_READERS = ("lightning", "lightning_5d")
"""Packages none of whose callbacks changes gradients."""


class GradientClipping(L.Callback):
    """Logs the norm of the gradients before and after clipping; on request clips by itself, or leaves steps out.

    The norm is one number over all ranks and axes. It is taken once per step, in one collective, and lent to the Trainer's
    own clipping. Without arguments the callback only watches, and ``Trainer(gradient_clip_val=…)`` clips.

    Logged for each step: `gradient_norm`, `gradient_norm_clipped`, `gradient_clipped_share` (of the steps taken so far),
    `gradient_clip_threshold` (where the callback clips), `gradient_skips_nonfinite` and `gradient_skips_spike` (where it may
    leave steps out), `gradient_norm/NAME` for each of `groups`. With several optimizers each name ends in ``/optimizerN``.

    Of the rules below those that are given hold together. Steps that the loss scale leaves out are not seen: they enter
    neither counts nor windows.

    Args:
        max_norm: Clip where the norm is above this.
        norm_type: The p of the p-norm, ``inf`` included.
        warmup_steps: Over so many steps (those taken) the limit moves, in a straight line, from `warmup_from` to `max_norm`.
        warmup_from: Where it starts, above or below `max_norm`.
        quantile: Clip where the norm is above this quantile (0 to 1) of the norms, before clipping, of the last `window` steps
            taken, this one not among them; the smaller limit holds when `max_norm` is given too.
        skip_nonfinite: Leave a step out if the norm is NaN or infinite.
        skip_spikes: Leave a step out if the norm is more than so many standard deviations above the mean of the last `window`
            (the deviation is taken to be at least a hundredth of the mean).
        max_skips_in_a_row: After so many steps left out in a row, training with norms that are not finite ends with an error on
            all ranks; norms that were taken for spikes become the new window, and the step is taken.
        window: How many norms `quantile` and `skip_spikes` look back on.
        min_history: How many there have to be before `quantile` and `skip_spikes` say anything.
        groups: Further norms to log, in the same collective: ``"optimizer"`` for its parameter groups, or patterns of
            parameter names (``*`` stands for anything), in a list or by the name to log.

    Raises:
        ValueError: If arguments do not go together; lists all problems.

    Source of `quantile`: Seetharaman et al., "AutoClip: Adaptive Gradient Clipping for Source Separation Networks" (2020),
    with a window in place of the whole history.
    """

    def __init__(
        self,
        max_norm: float | None = None,
        *,
        norm_type: float = 2.0,
        warmup_steps: int = 0,
        warmup_from: float | None = None,
        quantile: float | None = None,
        skip_nonfinite: bool = False,
        skip_spikes: float | None = None,
        max_skips_in_a_row: int = 20,
        window: int = 100,
        min_history: int = 10,
        groups: str | Sequence[str] | Mapping[str, str] | None = None,
    ) -> None:
        self.max_norm, self.norm_type = max_norm, float(norm_type)
        self.warmup_steps, self.warmup_from = warmup_steps, warmup_from
        self.quantile = quantile
        self.skip_nonfinite, self.skip_spikes, self.max_skips_in_a_row = skip_nonfinite, skip_spikes, max_skips_in_a_row
        self.window, self.min_history = window, min_history
        if groups is None or isinstance(groups, str):
            self.patterns: dict[str, str] = {}
        else:
            self.patterns = dict(groups) if isinstance(groups, Mapping) else {pattern: pattern for pattern in groups}
        self.by_param_group = groups == "optimizer"
        problems = self._problems()
        if isinstance(groups, str) and not self.by_param_group:
            problems.append(f'groups={groups!r}: give "optimizer", or a list of patterns such as ["{groups}"]')
        if problems:
            raise ValueError("GradientClipping: " + "; ".join(problems) + ".")
        self.histories: dict[int, NormHistory] = {}
        self._nonfinite = NonfiniteNorms()
        self._unmeasured: list[tuple[str, Optimizer, NormHistory, Tensor]] = []
        self._matched: set[str] | None = None

    @property
    def clips(self) -> bool:
        """Whether the callback clips by itself."""
        return self.max_norm is not None or self.quantile is not None

    @property
    def skips(self) -> bool:
        """Whether the callback may leave steps out."""
        return self.skip_nonfinite or self.skip_spikes is not None

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse what cannot work, before the first step."""
        if stage != "fit":
            return
        if self.clips and trainer.gradient_clip_val:
            raise MisconfigurationException(
                f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) and {self._settings()} would both clip. Leave"
                " one of them out: a GradientClipping() without a limit logs what the Trainer's clipping does."
            )
        known = (FiveD, SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)
        if not isinstance(trainer.strategy, known):
            raise MisconfigurationException(
                f"GradientClipping cannot read gradients under {type(trainer.strategy).__name__}, which keeps them in a form of"
                " its own. Use FiveD, one device, DDPStrategy or ModelParallelStrategy, or leave the callback out."
            )

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Take the norm; leave the step out, clip, or lend the norm to the Trainer's clipping."""
        if getattr(trainer.strategy, "overflow", False):
            return
        optimizer = unwrapped(optimizer)
        index = next((i for i, known in enumerate(trainer.optimizers) if known is optimizer), 0)
        suffix = f"/optimizer{index}" if len(trainer.optimizers) > 1 else ""
        history = self.histories.setdefault(index, NormHistory(self.window))
        named = self._named_groups(pl_module, optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norms = self._norms(trainer, [parameters, *named.values()])
        norm = norms[0]
        logged = {
            "gradient_norm": norm,
            **{f"gradient_norm/{name}": n for name, n in zip(named, norms[1:], strict=True)},
        }

        value = float(norm) if self.skips or self.quantile is not None else None
        if value is not None and not math.isfinite(value) and _scaled_by_lightning(trainer):
            return
        reason = self._reason_to_skip(trainer, pl_module, history, value) if value is not None and self.skips else None
        if reason is None:
            logged |= self._take(trainer, pl_module, optimizer, history, norm, value, suffix)
        else:
            _skip(trainer, optimizer, reason)
        if self.skip_nonfinite:
            logged["gradient_skips_nonfinite"] = float(history.skipped_nonfinite)
        if self.skip_spikes is not None:
            logged["gradient_skips_spike"] = float(history.skipped_spikes)
        for name, logged_value in logged.items():
            pl_module.log(name + suffix, logged_value, prog_bar=name == "gradient_norm")

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure what clipping by value, or by the module's own method, has left."""
        for suffix, optimizer, history, before in self._unmeasured:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            after = self._norms(trainer, [parameters])[0]
            history.clipped = history.clipped + (after < before * (1 - _ROUNDING)).long()
            pl_module.log(f"gradient_norm_clipped{suffix}", after)
            pl_module.log(f"gradient_clipped_share{suffix}", history.clipped / history.steps)
        self._unmeasured.clear()

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say what is still to say about norms that were not finite."""
        self._nonfinite.settle()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Counts and windows of each optimizer."""
        return {str(index): history.state_dict() for index, history in self.histories.items()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with them."""
        for index, state in state_dict.items():
            self.histories[int(index)] = NormHistory(self.window)
            self.histories[int(index)].load_state_dict(state)

    def threshold(self, history: NormHistory) -> float | None:
        """The limit for the next step, ``None`` where there is none yet."""
        limit = self.max_norm
        if limit is not None and self.warmup_from is not None and history.steps < self.warmup_steps:
            limit = self.warmup_from + (limit - self.warmup_from) * history.steps / self.warmup_steps
        if self.quantile is not None and len(history.norms) >= self.min_history:
            usual = history.quantile(self.quantile)
            limit = usual if limit is None else min(limit, usual)
        return limit

    def _take(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        optimizer: Optimizer,
        history: NormHistory,
        norm: Tensor,
        value: float | None,
        suffix: str,
    ) -> dict[str, Any]:
        """Clips, or has the Trainer clip, and returns what to log about it."""
        own = self.threshold(history)
        automatic = module.automatic_optimization
        overridden = automatic and is_overridden("configure_gradient_clipping", module)
        limit: float | None = own
        if self.clips:
            if own is not None:
                self._nonfinite.look_at(norm)  # a loss scaler would have left the step out before this
                clip_by_norm((p for group in optimizer.param_groups for p in group["params"]), own, norm)
        elif automatic and trainer.gradient_clip_val and not overridden:
            by_norm = trainer.gradient_clip_algorithm != "value"
            limit = float(trainer.gradient_clip_val) if by_norm and self.norm_type == 2.0 else None
            if limit is not None and isinstance(trainer.strategy, FiveD) and self._is_last_to_touch(trainer, module):
                trainer.strategy.share_norm(optimizer, norm)
            overridden = limit is None
        history.take(value)
        logged: dict[str, Any] = {} if own is None else {"gradient_clip_threshold": own}
        if overridden:
            self._unmeasured.append((suffix, optimizer, history, norm))
            return logged
        after = norm
        if limit is not None and not math.isinf(limit):
            history.clipped = history.clipped + (norm > limit * (1 + _ROUNDING)).long()
            after = norm * (limit / (norm + 1e-6)).clamp(max=1.0)
        share = history.clipped / history.steps
        return {**logged, "gradient_norm_clipped": after, "gradient_clipped_share": share}

    def _reason_to_skip(
        self, trainer: L.Trainer, module: L.LightningModule, history: NormHistory, value: float
    ) -> str | None:
        if not math.isfinite(value):
            if not self.skip_nonfinite:
                return None
            history.skipped_nonfinite += 1
            history.nonfinite_in_a_row += 1
            if history.nonfinite_in_a_row >= self.max_skips_in_a_row:
                mesh = trainer.strategy.mesh if isinstance(trainer.strategy, FiveD) else None
                found = nonfinite_gradients(module, mesh)
                first = f" The first parameter concerned is {found[0]}." if found else ""
                raise MisconfigurationException(
                    f"{history.nonfinite_in_a_row} steps in a row were left out because the gradient norm was {value}"
                    f" (max_skips_in_a_row={self.max_skips_in_a_row}).{first} Look for what makes its loss infinite, lower the"
                    " learning rate, or go on from an earlier checkpoint."
                )
            return NONFINITE
        if self.skip_spikes is None or len(history.norms) < self.min_history:
            return None
        if history.deviations(value) <= self.skip_spikes:
            return None
        if len(history.spikes_in_a_row) >= self.max_skips_in_a_row:
            rank_zero_warn(
                f"{len(history.spikes_in_a_row)} steps in a row were left out as spikes of the gradient norm, so this is its new"
                f" level: around {sum(history.spikes_in_a_row) / len(history.spikes_in_a_row):.4g} instead of"
                f" {sum(history.norms) / len(history.norms):.4g}. Steps are taken again."
            )
            history.restart(history.spikes_in_a_row)
            return None
        history.skipped_spikes += 1
        history.spikes_in_a_row.append(value)
        return SPIKE

    def _norms(self, trainer: L.Trainer, groups: Sequence[Iterable[Tensor]]) -> Tensor:
        """Shape (G,)."""
        if isinstance(trainer.strategy, FiveD):
            return trainer.strategy.gradient_norms(groups, self.norm_type)
        if not isinstance(trainer.strategy, ModelParallelStrategy):
            return global_norms(groups, None, self.norm_type)
        found = []
        for group in groups:
            grads = [parameter.grad for parameter in group if parameter.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads, self.norm_type)
            found.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        return torch.stack([norm.to(found[0].device) for norm in found])

    def _is_last_to_touch(self, trainer: L.Trainer, module: L.LightningModule) -> bool:
        """Whether nobody's code runs between here and clipping that might change gradients; the same on all ranks."""
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        later = callbacks[callbacks.index(self) + 1 :]
        strangers = [callback for callback in later if type(callback).__module__.split(".")[0] not in _READERS]
        return not is_overridden("on_before_optimizer_step", module) and not any(
            is_overridden("on_before_optimizer_step", callback) for callback in strangers
        )

    def _named_groups(self, module: L.LightningModule, optimizer: Optimizer) -> dict[str, list[Tensor]]:
        if self.by_param_group:
            return {str(group.get("name", i)): group["params"] for i, group in enumerate(optimizer.param_groups)}
        if not self.patterns:
            return {}
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        named = [(plain_name(name), parameter) for name, parameter in module.named_parameters()]
        if self._matched is None:
            axes = getattr(module.trainer.strategy, "parallelized", ())
            known = [name for name, _ in named]
            known += [name for axis in axes if (whole := axis.stages()) is not None for name in whole.first_names]
            self._matched = {p for p in self.patterns.values() if any(fnmatchcase(name, p) for name in known)}
            missing = [pattern for pattern in self.patterns.values() if pattern not in self._matched]
            if missing:
                rank_zero_warn(
                    f"GradientClipping: no parameter is named {' or '.join(map(repr, missing))}; its norm will be 0. Parameters"
                    f" here: {', '.join(name for name, _ in named[:4])}, …"
                )
        return {
            label: [parameter for name, parameter in named if id(parameter) in stepped and fnmatchcase(name, pattern)]
            for label, pattern in self.patterns.items()
        }

    def _settings(self) -> str:
        given = {"max_norm": self.max_norm, "quantile": self.quantile}
        return f"GradientClipping({', '.join(f'{name}={value}' for name, value in given.items() if value is not None)})"

    def _problems(self) -> list[str]:
        numbers = {name: getattr(self, name) for name in ("max_norm", "warmup_from", "quantile", "skip_spikes")}
        problems = [
            f"{name}={value!r} is not a number"
            for name, value in numbers.items()
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float))
        ]
        for name in ("warmup_steps", "max_skips_in_a_row", "window", "min_history"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                problems.append(f"{name}={value!r} is not a whole number")
        if problems:
            return problems
        if self.max_norm is not None and not self.max_norm > 0:
            problems.append(f"max_norm={self.max_norm} is not positive (leave it out for no limit)")
        if not self.norm_type > 0:
            problems.append(f"norm_type={self.norm_type} is not positive (2 is usual, inf the largest element)")
        if (self.warmup_steps > 0) != (self.warmup_from is not None) or (
            self.warmup_steps > 0 and self.max_norm is None
        ):
            problems.append(
                f"warmup_steps={self.warmup_steps}, warmup_from={self.warmup_from} and max_norm={self.max_norm} go together:"
                " give all three"
            )
        elif self.warmup_steps < 0 or (self.warmup_from is not None and not self.warmup_from > 0):
            problems.append(f"warmup_steps={self.warmup_steps} and warmup_from={self.warmup_from} have to be positive")
        if self.quantile is not None and not 0 < self.quantile <= 1:
            problems.append(f"quantile={self.quantile} is not between 0 and 1 (0.9 lets nine of ten steps pass)")
        if self.skip_spikes is not None and not self.skip_spikes > 0:
            problems.append(f"skip_spikes={self.skip_spikes} is not a positive number of standard deviations")
        if self.max_skips_in_a_row < 1:
            problems.append(f"max_skips_in_a_row={self.max_skips_in_a_row} is less than 1")
        if not 2 <= self.min_history <= self.window:
            problems.append(f"min_history={self.min_history} is not between 2 and window={self.window}")
        return problems


def _skip(trainer: L.Trainer, optimizer: Optimizer, reason: str) -> None:
    if isinstance(trainer.strategy, FiveD):
        trainer.strategy.skip_step(reason)
        return
    # Lightning has no way to leave a step out. Optimizers leave parameters without gradient alone, so weights and their
    # states stay as they are; the learning rate's schedule moves on.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _scaled_by_lightning(trainer: L.Trainer) -> bool:
    """Whether Lightning's own loss scaler will leave this step out."""
    return not isinstance(trainer.strategy, FiveD) and getattr(trainer.precision_plugin, "scaler", None) is not None

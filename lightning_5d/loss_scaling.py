"""Dynamic loss scaling: keeps fp16 gradients inside the range that fp16 has.

The loss is multiplied by a scale before backward and final gradients are divided by it again. A scale that is too large
makes gradients overflow; that step is left out and the scale shrinks. After enough good steps in a row it grows.

Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.2; the rules are those of `torch.amp.GradScaler`,
with the floor and the hysteresis of Megatron-LM's `DynamicGradScaler` (``megatron/core/optimizer/grad_scaler.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_5d.gradients import local_gradients, scale_gradients
from lightning_5d.parallelism import Problem, raise_problems

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class LossScaling:
    """Settings of dynamic loss scaling.

    Args:
        init_scale: The first scale.
        growth_factor: What the scale is multiplied with after `growth_interval` good steps in a row; 1 keeps it.
        backoff_factor: What the scale is multiplied with after an overflow, below 1.
        growth_interval: Good steps in a row before the scale grows.
        min_scale: The floor: the scale does not shrink below it.
        hysteresis: Overflows that are tolerated before the scale shrinks, counting the one that makes it shrink: with 2 the
            first overflow only skips its step. Filled up again whenever the scale grows.

    Raises:
        MisconfigurationException: If values are impossible; lists all of them.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    hysteresis: int = 1

    def __post_init__(self) -> None:
        problems = []
        for name in ("init_scale", "min_scale"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 < value <= _LARGEST:
                problems.append(
                    Problem(f"LossScaling({name}={value!r}) is not a positive, finite number.", "Use 1.0 or more.")
                )
        if not problems and self.init_scale < self.min_scale:
            what = f"LossScaling(init_scale={self.init_scale:g}, min_scale={self.min_scale:g}) starts below its floor."
            problems.append(Problem(what, f"Use min_scale={self.init_scale:g} or less."))
        if not _is_number(self.growth_factor) or not 1 <= self.growth_factor < math.inf:
            what = f"LossScaling(growth_factor={self.growth_factor!r}) would not grow."
            problems.append(Problem(what, "Use 2.0, or 1.0 for a scale that only shrinks."))
        if not _is_number(self.backoff_factor) or not 0 < self.backoff_factor < 1:
            what = f"LossScaling(backoff_factor={self.backoff_factor!r}) would not shrink."
            problems.append(Problem(what, "Use a number between 0 and 1, such as 0.5."))
        for name in ("growth_interval", "hysteresis"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                what = f"LossScaling({name}={value!r}) is not a whole number of at least 1."
                problems.append(Problem(what, "Use 2000." if name == "growth_interval" else "Use 1 for none."))
        raise_problems(problems)


class LossScaler:
    """The scale of a run, and which gradients carry it.

    Args:
        settings: How it grows and shrinks.
    """

    def __init__(self, settings: LossScaling | None = None) -> None:
        self.settings = settings or LossScaling()
        self.scale = float(self.settings.init_scale)
        self.growth_tracker = 0
        self.hysteresis_left = self.settings.hysteresis
        self._backwards = 0
        # Parameters whose gradient has been divided by the scale already. Backward may add to such a gradient (it was kept
        # over a step), and the scale may change while others wait for their optimizer's step (several optimizers).
        self._unscaled: dict[int, Tensor] = {}
        self._overflowed: set[int] = (
            set()
        )  # those of them that were not finite then, whatever clipping has made of them

    @property
    def at_floor(self) -> bool:
        """Whether the scale cannot shrink any further."""
        return self.scale <= self.settings.min_scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The tensor to start backward from.

        Args:
            loss: The loss; a half-precision one is multiplied in fp32, where the product cannot overflow.
        """
        self._backwards += 1
        kept = [parameter for parameter in self._unscaled.values() if parameter.grad is not None]
        if kept:  # backward adds scaled gradients to them
            scale_gradients(kept, self.scale)
        self._unscaled.clear()
        self._overflowed.clear()
        wide = loss if loss.dtype in (torch.float32, torch.float64) else loss.float()
        return wide * self.scale

    def unscale(self, parameters: Iterable[Tensor]) -> bool:
        """Divides the gradients of some parameters by the scale, in place and once, and says whether this rank's are finite.

        Args:
            parameters: An optimizer's parameters, plain or `DTensor`.

        Raises:
            ValueError: If there are gradients and no loss was ever scaled.
        """
        with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
        if with_gradient and not self._backwards:
            raise ValueError(
                "Gradients did not come through loss scaling, so dividing them by the scale would make them too small. Call"
                " self.manual_backward(loss) in place of loss.backward()."
            )
        scaled = [parameter for parameter in with_gradient if id(parameter) not in self._unscaled]
        already = [parameter for parameter in with_gradient if id(parameter) in self._unscaled]
        self._unscaled.update({id(parameter): parameter for parameter in scaled})
        if _multiply_and_check(local_gradients(scaled), 1.0 / self.scale):
            self._overflowed.update(map(id, scaled))
        overflow = any(id(parameter) in self._overflowed for parameter in with_gradient)
        return not (_multiply_and_check(local_gradients(already), 1.0) or overflow)

    def update(self, overflow: bool, waiting: Iterable[Tensor] = ()) -> None:
        """Lets the scale shrink after an overflow, or count a good step and perhaps grow.

        Args:
            overflow: Whether any rank's gradients were not finite.
            waiting: Parameters whose scaled gradients are still to be used, by another optimizer: they follow the scale.
        """
        before, settings = self.scale, self.settings
        if overflow:
            self.growth_tracker = 0
            self.hysteresis_left = max(self.hysteresis_left - 1, 0)
            if not self.hysteresis_left:
                self.scale = max(self.scale * settings.backoff_factor, settings.min_scale)
        else:
            self.growth_tracker += 1
            if self.growth_tracker >= settings.growth_interval:
                self.growth_tracker = 0
                self.hysteresis_left = settings.hysteresis
                if self.scale * settings.growth_factor <= _LARGEST:
                    self.scale *= settings.growth_factor
        if self.scale != before:
            still_scaled = [p for p in waiting if p.grad is not None and id(p) not in self._unscaled]
            scale_gradients(still_scaled, self.scale / before)

    def take_back(self, state: Mapping[str, Any]) -> None:
        """Goes back to a state before the last `update`, in which nothing else has changed."""
        self.scale = float(state["scale"])
        self.growth_tracker = int(state["growth_tracker"])
        self.hysteresis_left = int(state["hysteresis_left"])

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on exactly where this run is."""
        return {
            "scale": self.scale,
            "growth_tracker": self.growth_tracker,
            "hysteresis_left": self.hysteresis_left,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a saved state; the settings stay those of this object."""
        self.scale = float(state["scale"])
        self.growth_tracker = int(state["growth_tracker"])
        self.hysteresis_left = int(state.get("hysteresis_left", self.settings.hysteresis))
        self._unscaled.clear()
        self._overflowed.clear()


def _multiply_and_check(gradients: Sequence[Tensor], factor: float) -> bool:
    """Multiplies tensors in place and says whether any has an element that is not finite."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    flags = []
    for (device, _), members in groups.items():
        flag = torch.zeros(1, device=device)
        # Checked with torch 2.13: the kernel under `torch.amp.GradScaler`, one pass for both; fp16 gradients included.
        torch._amp_foreach_non_finite_check_and_unscale_(members, flag, torch.tensor([factor], device=device))
        flags.append(flag)
    return any(bool(flag) for flag in flags)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

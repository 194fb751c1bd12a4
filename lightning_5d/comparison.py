"""Two runs of one module side by side: what of them is equal, and what cannot be judged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_NOISE = 1e-5
"""A gradient this much smaller than the largest one of its step is what rounding leaves of a zero."""
_CANCELLED = 1e-3
"""Two runs whose gradients of an element differ by this share of it, and by no more than passes, have computed what cancellation left."""


@dataclass(frozen=True)
class Row:
    """One compared quantity.

    Attributes:
        quantity: ``"loss"``, ``"gradient"``, ``"gradient norm"`` or ``"parameter"``.
        where: The step and, for tensors, the name of the worst one.
        reference: The value in one process (of a tensor: the largest magnitude).
        difference: The largest difference divided by the reference's largest magnitude.
        tolerance: What `difference` may be.
    """

    quantity: str
    where: str
    reference: float
    difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance; NaN is not."""
        return self.difference <= self.tolerance


@dataclass
class Recording:
    """What one run did: whole tensors on the CPU, by step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)

    def overflows(self) -> set[int]:
        """Steps with a gradient that is not finite."""
        return {
            step
            for step, gradients in enumerate(self.gradients)
            if not all(bool(gradient.isfinite().all()) for gradient in gradients.values())
        }


def compare(expected: Recording, found: Recording, tolerance: float) -> Iterator[Row]:
    """The worst row of each kind between two recordings.

    Args:
        expected: The run in one process.
        found: The run under the strategy.
        tolerance: Largest relative difference that passes.
    """
    skipped = expected.overflows() & found.overflows()
    for quantity, one, other in (
        ("loss", expected.losses, found.losses),
        ("gradient norm", expected.norms, found.norms),
    ):
        rows = [
            Row(quantity, f"step {i}", a, _relative(torch.tensor(a), torch.tensor(b)), tolerance)
            for i, (a, b) in enumerate(zip(one, other, strict=True))
            if quantity == "loss" or i not in skipped
        ]
        yield _worst(rows)
    yield _worst(
        [
            row
            for i, (one, other) in enumerate(zip(expected.gradients, found.gradients, strict=True))
            if i not in skipped
            for row in _tensor_rows("gradient", one, other, tolerance, f" (step {i})")
        ]
    )
    kept, theirs = judged_parameters(expected, found, tolerance)
    yield _worst(list(_tensor_rows("parameter", kept, theirs, tolerance, "")))


def judged_parameters(
    expected: Recording, found: Recording, tolerance: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters of both runs, without those and without elements of those whose gradient is rounding alone."""
    noise = noise_parameters(expected)
    elements = noise_elements(expected, found, tolerance)
    kept, theirs = (
        {
            name: tensor.masked_fill(elements[name], 0.0) if name in elements else tensor
            for name, tensor in recording.parameters.items()
            if name not in noise
        }
        for recording in (expected, found)
    )
    return kept, theirs


def noise_parameters(recording: Recording) -> set[str]:
    """Parameters whose gradient was zero but for rounding in every step, such as a bias before batch normalization.

    An optimizer that divides by the gradient's own size turns that rounding into steps of full length.
    """
    names: set[str] = {name for gradients in recording.gradients for name in gradients}
    for gradients in recording.gradients:
        largest = _largest(gradients)
        names -= {
            name for name, grad in gradients.items() if grad.numel() and float(grad.abs().max()) > _NOISE * largest
        }
    return names


def noise_elements(expected: Recording, found: Recording, tolerance: float) -> dict[str, Tensor]:
    """By parameter, elements that differ because their gradient is zero but for rounding; only parameters that have some.

    The keys' part of the bias of a fused attention projection is such: softmax takes its gradient away. The gradient of an element is
    rounding in a step if it is another in the other run, by a share of itself, and yet by less than what passes for gradients of its
    tensor: so it is small there. One such step is enough: an optimizer like Adam has then moved the element by something else.
    """
    noise: dict[str, Tensor] = {}
    for name, parameter in expected.parameters.items():
        other = found.parameters.get(name)
        if other is None or other.shape != parameter.shape or not parameter.numel():
            continue
        apart = (parameter - other).abs() > tolerance * parameter.abs().max()
        if not bool(apart.any()):
            continue
        rounding = torch.zeros_like(apart)
        for one, two in zip(expected.gradients, found.gradients, strict=True):
            if name in one and name in two:
                size, difference = one[name].abs(), (one[name] - two[name]).abs()
                rounding |= (difference > _CANCELLED * size) & (size > 0) & (difference <= tolerance * size.max())
        if bool((apart & rounding).any()):
            noise[name] = apart & rounding
    return noise


def _largest(tensors: Mapping[str, Tensor]) -> float:
    return max((float(tensor.abs().max()) for tensor in tensors.values() if tensor.numel()), default=0.0)


def _tensor_rows(
    quantity: str, one: Mapping[str, Tensor], other: Mapping[str, Tensor], tolerance: float, suffix: str
) -> Iterator[Row]:
    # A tensor that is zero but for rounding is measured by the rounding of the largest one.
    floor = max(_NOISE * _largest(one), 1e-6 * tolerance)
    for name in sorted(set(one) | set(other)):
        if name not in one or name not in other:
            # A missing gradient and one of zeros move a parameter alike under plain SGD only; elsewhere it is a difference.
            present = one.get(name, other.get(name, torch.zeros(())))
            same = quantity == "gradient" and not bool(present.abs().max() > 0)
            yield Row(quantity, f"{name}{suffix}, missing on one side", 0.0, 0.0 if same else math.inf, tolerance)
        else:
            a, b = one[name], other[name]
            yield Row(
                quantity, name + suffix, float(a.abs().max()) if a.numel() else 0.0, _relative(a, b, floor), tolerance
            )


def _relative(one: Tensor, other: Tensor, floor: float = 1e-6) -> float:
    if one.shape != other.shape:
        return math.inf
    if not one.numel():
        return 0.0
    a, b = one.double(), other.double()
    return float((a - b).abs().max() / a.abs().max().clamp(min=floor))


def _worst(rows: Sequence[Row]) -> Row:
    if not rows:
        raise ValueError("Nothing was recorded: the run made no optimizer step.")
    return max(rows, key=lambda row: math.inf if math.isnan(row.difference) else row.difference)

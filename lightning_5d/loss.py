"""The loss contract: what a step returns, and what the gradient of a window of microbatches is.

A step returns a mean over its microbatch. Over a window (all microbatches between two optimizer steps, on all data ranks) the
gradient is the mean over microbatches; a step that returns ``{"loss": mean, "weight": tokens}`` makes it the weighted mean
``sum(w L) / sum(w)``, exactly as one big batch would. The last, incomplete window of an epoch is divided by the number of
microbatches it has, not by `accumulate_grad_batches`, under every layout.

The divisor is known only when the window ends, so each backward runs with a provisional factor, and `LossWindow.correction`
gives the factor that gradients are multiplied with before anybody reads them. In the common case it is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor


def weight_of(output: Any) -> float | None:
    """The weight in a training step's output.

    Args:
        output: What `training_step` returned: a tensor, ``None``, or a mapping with ``"loss"`` and perhaps ``"weight"``.

    Returns:
        The weight, or ``None`` where none was given.

    Raises:
        ValueError: If the weight is negative or not finite, or not a scalar.
    """
    if not isinstance(output, Mapping) or "weight" not in output or output.get("loss") is None:
        return None
    raw = output["weight"]
    if isinstance(raw, Tensor) and raw.numel() != 1:
        raise ValueError(f"`weight` must be one number per microbatch, got a tensor of shape {tuple(raw.shape)}.")
    weight = float(raw)
    if not 0 <= weight < float("inf"):
        raise ValueError(f"`weight` is {weight}; it must be finite and not negative (the number of tokens, usually).")
    return weight


def check_returned(output: Any, rank: int, world_size: int) -> None:
    """Refuses a training step of automatic optimization that returns nothing where others may wait for its gradients.

    Raises:
        MisconfigurationException: If the step returned ``None`` and there is more than one rank.
    """
    if output is None and world_size > 1:
        raise MisconfigurationException(
            f"training_step returned None on rank {rank} of {world_size}; ranks that did return a loss would wait for the"
            ' gradients of this one. To leave a microbatch out, return {"loss": loss, "weight": 0.0} for it and'
            ' {"loss": loss, "weight": 1.0} for the others.'
        )


def zero_like_loss(loss: Tensor, owed: Sequence[Tensor] = ()) -> Tensor:
    """A zero with a graph of its own: stands for the loss of a microbatch of weight zero.

    The user's loss is usually 0/0 there, and no factor makes a gradient of NaN vanish, so its graph is not used at all.

    Args:
        loss: That loss.
        owed: Where backward starts nevertheless, with zeros.
    """
    if owed:
        zero: Tensor = _Zero.apply(loss.detach(), *owed)  # type: ignore[no-untyped-call]
        return zero
    return torch.zeros((), dtype=loss.dtype, device=loss.device, requires_grad=True) * 1


class _Zero(torch.autograd.Function):
    """Zero, whatever the tensors are; their gradients are zeros."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *tensors: Tensor) -> Tensor:
        ctx.forms = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.forms)


class LossWindow:
    """Counts the microbatches of one accumulation window and their weights."""

    def __init__(self) -> None:
        self.count = 0
        self._weight_sum = 0.0
        self._weighted = 0
        self._reference: float | None = None
        self._warned = self._own_backward = False

    def restart(self) -> None:
        """Forgets microbatches whose gradients were not used."""
        self.count, self._weighted, self._weight_sum = 0, 0, 0.0
        self._own_backward = False

    def note_own_backward(self) -> None:
        """A backward of the user's own has added to the gradients of this window; its loss has no weight."""
        self._own_backward = True

    def scale(self, weight: float | None, group: dist.ProcessGroup, device: torch.device) -> float:
        """The factor for the backward of the next microbatch, counted in; all data ranks call it together.

        Args:
            weight: This microbatch's weight, or ``None``.
            group: The data ranks.
            device: Where a collective's tensor may live.

        Raises:
            ValueError: If some microbatches of the window have weights and others have none.
        """
        if not self.count:
            self._own_backward = False  # gradients have just been cleared
        self.count += 1
        if weight is not None:
            self._weighted += 1
        if self._weighted not in (0, self.count):
            raise ValueError(
                f"Of {self.count} microbatches in one accumulation window {self._weighted} returned a weight."
                " Return one from every training_step, or from none."
            )
        if weight is None:
            return 1.0
        self._weight_sum += weight
        return self.provisional(weight, group, device)

    def provisional(
        self, weight: float, group: dist.ProcessGroup, device: torch.device, *, agree: bool = True
    ) -> float:
        """The factor for a microbatch of this weight, not counted in; all data ranks call it together.

        Args:
            weight: The weight.
            group: The data ranks.
            device: Where a collective's tensor may live.
            agree: Whether the very first weight may set the common size.
        """
        if self._reference is None:
            # A common size for weights, so that scaled losses stay near the true ones; later windows use the last mean.
            total = torch.tensor([weight if agree else 1.0, 1.0], dtype=torch.float64, device=device)
            dist.all_reduce(total, group=group)
            self._reference = float(total[0] / total[1]) or 1.0
        return weight / self._reference

    def add_batch(
        self, weights: Sequence[float | None], group: dist.ProcessGroup, device: torch.device, *, agree: bool = True
    ) -> None:
        """Counts a batch in whose microbatches ran as a schedule; every stage's data ranks call it together.

        Args:
            weights: The weight of each of its microbatches.
            group: The data ranks.
            device: Where a collective's tensor may live.
            agree: As it was for `provisional`.

        Raises:
            ValueError: If some microbatches of the window have weights and others have none.
        """
        given = [weight for weight in weights if weight is not None]
        self.count += 1
        self._weighted += bool(given)
        if len(given) not in (0, len(weights)) or self._weighted not in (0, self.count):
            raise ValueError(
                f"Of {len(weights)} microbatches of a batch {len(given)} returned a weight. Return one from every training_step,"
                " or from none."
            )
        if given:
            self._weight_sum += sum(given)
            self.provisional(given[0], group, device, agree=agree)  # on stages that have not seen the first

    def correction(
        self, planned: int, group: dist.ProcessGroup, device: torch.device, batches: float = math.inf
    ) -> float:
        """The factor that gradients of this window still need; ends the window.

        Args:
            planned: `accumulate_grad_batches`, by which Lightning has divided every loss (1 if it has not).
            group: The data ranks, over which gradients have been averaged.
            device: Where a collective's tensor may live.
            batches: Microbatches of an epoch; fewer than planned is warned of once.

        Returns:
            The factor; 0 where every weight of the window was 0.

        Raises:
            MisconfigurationException: If a backward of the user's own has added to gradients that a factor is due to.
        """
        count, weighted, weight_sum, own_backward = self.count, self._weighted, self._weight_sum, self._own_backward
        self.restart()
        if not count:
            return 1.0
        if batches < planned and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"accumulate_grad_batches={planned}, but an epoch has {batches} batches per rank: the optimizer steps at the"
                f" end of each epoch, with the mean over {batches}. Use at most accumulate_grad_batches={batches}."
            )
        if own_backward and (weighted or planned != count):
            kind = "weights" if weighted else f"{count} of {planned} microbatches"
            raise MisconfigurationException(
                f"The gradients of an accumulation window with {kind} are divided when it ends, and a backward of your own, after the"
                " window's first microbatch has cleared gradients, has added others to them. Use torch.autograd.grad(loss, inputs) in its"
                " place, or return the sum of both losses."
            )
        if not weighted:
            return planned / count
        # Gradients now hold 1/(ranks * planned) * sum(w/reference * dL); wanted is sum(w * dL) / sum(w).
        total = torch.tensor([weight_sum, float(count)], dtype=torch.float64, device=device)
        dist.all_reduce(total, group=group)
        weight_total, count_total = total.tolist()
        reference = self._reference or 1.0
        self._reference = weight_total / count_total or reference
        if not weight_total:
            return 0.0
        return float(dist.get_world_size(group) * planned * reference / weight_total)

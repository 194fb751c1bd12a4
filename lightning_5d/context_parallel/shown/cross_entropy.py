"""Cross-entropy over tokens that ranks hold some of: each adds up the losses of its own, and one number travels.

Labels are whole on every rank, so that how many of them count is known without asking anybody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_5d.context_parallel.shown.shard import SequenceShard, held, show, taken
from lightning_5d.context_parallel.shown.totals import total
from lightning_5d.context_parallel.step_sequence import StepSequence
from lightning_5d.shown.made_whole import tell
from lightning_5d.shown.reductions import wide
from lightning_5d.shown.targets import check_targets, refuse_strangers

Loss = Callable[..., Tensor]
"""`F.cross_entropy` or `F.nll_loss`."""


def token_loss(
    loss: Loss, input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, **options: Any
) -> Tensor:
    """A loss of logits or log probabilities of whole sequences, of which each rank holds some tokens.

    Args:
        loss: What computes it for the tokens of one rank.
        input: Shape (N, V) or (N, V, d1, ...), some dimension but that of the classes being cut.
        target: Class indices (N,) or (N, d1, ...), or probabilities of the shape of `input`. Whole and the same on all ranks, or
            cut in the same way.
        weight: A factor for each class, shape (V,).
        ignore_index: Targets that have no part in loss and gradient.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.
        options: Others of `loss`.

    Returns:
        The loss, equal on all ranks: a scalar, or with ``"none"`` a `SequenceShard`.
    """
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    class_dim = 0 if input.ndim == 1 else 1
    if not isinstance(input, SequenceShard) or input.cut_dim == class_dim:
        input, target = _whole(input, loss), _whole(target, loss)
        options |= {"weight": weight, "ignore_index": ignore_index, "reduction": reduction}
        return loss(input, target, **options)
    probabilities = loss is F.cross_entropy and input.shape == target.shape
    dim = input.cut_dim if probabilities else input.cut_dim - (input.cut_dim > class_dim)
    if not probabilities:
        check_targets(input, target, weight, class_dim)
    placement = input.placement.at(dim)
    if isinstance(target, SequenceShard) and not (target.cut_dim == dim and target.placement.matches(placement)):
        target = _whole(target, loss)
    own_target = held(target) if isinstance(target, SequenceShard) else taken(target, placement)
    own = held(input)

    counted: Tensor | None = None
    if not probabilities:
        valid = target != ignore_index
        refuse_strangers(target.masked_fill(~valid, 0), input.shape[class_dim])
        if reduction == "mean":
            counted = (
                valid.sum() if weight is None else weight[target.masked_fill(~valid, 0).long()].where(valid, 0).sum()
            )
    # 16-bit losses are added up in fp32, as one process does it.
    half = wide(own.dtype) != own.dtype
    each = loss(
        own, own_target, weight=weight, ignore_index=ignore_index, reduction="none" if half or reduction == "none" else "sum", **options
    )  # fmt: skip
    if reduction == "none":
        return show(each, placement if not probabilities else placement.at(dim - (dim > class_dim)))
    summed = total(each.sum(dtype=wide(each.dtype)) if half else each, input.axis)
    if reduction == "mean":
        summed = summed / (input.numel() // input.shape[class_dim] if counted is None else counted.to(summed.dtype))
    return summed.to(each.dtype)


def _whole(x: Tensor, loss: Loss) -> Tensor:
    if not isinstance(x, SequenceShard):
        return x
    tell(f"{loss.__name__} over the tokens of a sequence, or with targets that are cut in another way", x)
    return x.whole()


def local_cross_entropy(logits: Tensor, labels: Tensor, sequence: StepSequence, rows: int, **options: Any) -> Tensor:
    """The cross-entropy of a whole sequence inside a door, where logits are this rank's and labels are whole.

    Its gradient is that of the inside: see [Note: gradients inside and outside of doors] in `shard.py`.

    Args:
        logits: This rank's, padding included: (B*s, V), or (B, V, s).
        labels: Whole: class indices (B*S,) or (B, S); or probabilities (B*S, V), (B, V, S).
        sequence: The sequence inside the door.
        rows: B.
        options: Of `F.cross_entropy`.

    Returns:
        The loss, the same on all ranks; with ``reduction="none"`` that of this rank's tokens, (B*s,) or (B, s), 0 for padding.

    Raises:
        ValueError: If sizes do not fit the sequence.
    """
    cut = sequence.cut
    flat = logits.ndim == 2
    whole_rows = rows * cut.length
    fits = logits.shape[0] == rows * cut.local and labels.shape[0] == whole_rows if flat else (
        logits.ndim == 3 and logits.shape[::2] == (rows, cut.local) and labels.shape[:1] + labels.shape[-1:] == (rows, cut.length)
    )  # fmt: skip
    if not fits:
        raise ValueError(
            f"Logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)} are not those of {rows} rows of {cut.local} of"
            f" {cut.length} tokens each. Give logits of all tokens of this rank, and whole labels."
        )
    if flat:
        shown = SequenceShard.wrap(logits.view(rows, cut.local, -1), dim=1, sequence=sequence).flatten(0, 1)
    else:
        shown = SequenceShard.wrap(logits, dim=2, sequence=sequence)
    loss = F.cross_entropy(shown, labels, **options)
    if not isinstance(loss, SequenceShard):
        return loss
    if flat:
        loss = loss.view(rows, cut.length)
    inside = SequenceShard.enter(loss, 1, sequence)
    return inside.flatten() if flat else inside

"""A door by hand, and the plainest attention over several ranks: all keys on every rank, with a mask of all pairs.

What is tested with it is what happens to calls inside a door, whichever method of attention is behind.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_5d.context_parallel.attention import ContextAttention
from lightning_5d.context_parallel.cut import Balance, SequenceCut
from lightning_5d.context_parallel.inside import Inside
from lightning_5d.context_parallel.masks import AttentionMask
from lightning_5d.context_parallel.redirect import Redirect
from lightning_5d.context_parallel.step_sequence import StepSequence
from lightning_5d.data_parallel.traffic import Traffic
from lightning_5d.tensor_parallel.axis import Arriving, Reduction, TensorAxis, open_axis


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, sequence: StepSequence) -> Tensor:
        ctx.sequence = sequence
        return sequence.gather(local.contiguous(), 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.sequence.part(ctx.sequence.axis.sum(gradient), 2), None


class GatheredAttention(ContextAttention):
    def __init__(self, axis: TensorAxis) -> None:
        self.axis, self.traffic = axis, Traffic()
        self.masks: list[AttentionMask] = []
        self.heads: list[tuple[int, int]] = []
        self.dtypes: list[torch.dtype] = []

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, cut: SequenceCut, scale: float | None = None
    ) -> Tensor:
        assert q.ndim == k.ndim == v.ndim == 4
        self.masks.append(mask)
        self.heads.append((q.shape[1], k.shape[1]))
        self.dtypes.append(q.dtype)
        sequence = StepSequence(cut, self.axis)
        whole_k, whole_v = _Whole.apply(k, sequence), _Whole.apply(v, sequence)
        seen = visible(mask, sequence.positions(q.device)[0], cut.length)
        with torch._C.DisableTorchFunction():
            return F.scaled_dot_product_attention(q, whole_k, whole_v, seen, scale=scale, enable_gqa=True)


def visible(mask: AttentionMask, rows: Tensor, length: int) -> Tensor:
    """(B|1, 1, rows, length): which keys the queries at these positions see."""
    columns = torch.arange(length)
    seen = torch.ones(1, len(rows), length, dtype=torch.bool)
    if mask.causal:
        seen = seen & (columns <= rows[:, None])
    if mask.window is not None:
        seen = seen & ((columns - rows[:, None]).abs() < mask.window)
    if mask.keys is not None:
        seen = seen & mask.keys[:, None, :]
    if mask.documents is not None:
        held = rows.clamp(max=length - 1)
        seen = seen & (mask.documents[:, held, None] == mask.documents[:, None, :])
    return seen[:, None]


class Mirrored(TensorAxis):
    """One rank of an axis, whose others hold what it holds: for what is refused, or drawn, before anything is sent."""

    def __init__(self, rank: int = 0, size: int = 2) -> None:
        self.rank, self.size, self.traffic = rank, size, Traffic()

    def start_sum(self, x: Tensor, reduction: Reduction = "sum") -> Arriving:
        return _Here(x * self.size if reduction == "sum" else x.clone())

    def start_gather(self, x: Tensor, dim: int) -> Arriving:
        return _Here(torch.cat([x.detach()] * self.size, dim))

    def start_scatter_sum(self, x: Tensor, dim: int) -> Arriving:
        raise NotImplementedError


class _Here(Arriving):
    def __init__(self, result: Tensor) -> None:
        self._result = result

    def wait(self) -> Tensor:
        return self._result


class HandMadeDoor:
    """Calls a module as a door would, on one rank of a group.

    Args:
        length: Of the sequences.
        balance: How they are cut.
        axis: The ranks; those of the process's group, if not given.
    """

    def __init__(self, length: int, balance: Balance = "zigzag", axis: TensorAxis | None = None) -> None:
        self.axis = open_axis(dist.group.WORLD) if axis is None else axis  # type: ignore[arg-type]
        self.cut = SequenceCut(length, self.axis.size, balance)
        self.sequence = StepSequence(self.cut, self.axis)
        self.attention = GatheredAttention(self.axis)
        self.redirect = Redirect(self.attention)

    def inside(self, documents: Tensor | None = None, rows: int = 1) -> Inside:
        return Inside("the model", self.sequence, documents, rows=rows)

    def local(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs with this rank's tokens: of all that have the sequence's length behind the batch."""
        return {
            name: self.sequence.part(x, 1)
            if isinstance(x, Tensor) and x.ndim > 1 and x.shape[1] == self.cut.length
            else x
            for name, x in inputs.items()
        }

    def __call__(self, model: nn.Module, documents: Tensor | None = None, **inputs: Any) -> Any:
        local = self.local(inputs)
        with self.redirect.inside(self.inside(documents)):
            return model(**local)

    def close(self) -> None:
        self.axis.close()


def first_output(output: Any) -> Tensor:
    """The tensor of a model's output, or its logits, or hidden states."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        if getattr(output, name, None) is not None:
            found: Tensor = getattr(output, name)
            return found
    return first_output(output[0])


def gradients(model: nn.Module, output: Tensor, weights: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (output * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def difference_from_one_process(
    door: HandMadeDoor,
    model: nn.Module,
    documents: Tensor | None = None,
    extra: Mapping[str, Any] | None = None,
    **inputs: Any,
) -> float:
    """The largest difference of outputs and gradients of weights between all ranks and one process, relative to their size.

    Args:
        door: Of this rank.
        model: The same on all ranks.
        documents: See `Inside`.
        extra: Inputs that only the rank's part gets, as doors give positions.
        inputs: Of the model.
    """
    reference = first_output(model(**inputs))
    keep = inputs.get("attention_mask")
    weights = torch.randn(reference.shape, generator=torch.Generator().manual_seed(5))
    if keep is not None and keep.ndim == 2:  # what padding is mapped to is nobody's concern
        weights = weights * keep[..., None]
    expected = gradients(model, reference, weights)
    local = first_output(door(model, documents, **inputs, **(extra or {})))
    found = gradients(model, local, door.sequence.part(weights, 1))
    whole = door.sequence.gather(local.detach(), 1)
    if keep is not None and keep.ndim == 2:
        whole, reference = whole * keep[..., None], reference * keep[..., None]
    worst = _apart(whole, reference)
    # A gradient that is nothing but rounding, as that of a bias of keys, has no size of its own.
    floor = max(float(gradient.abs().max()) for gradient in expected.values()) / 100
    for name, gradient in expected.items():
        mine = found.get(name)
        worst = max(worst, _apart(door.axis.sum(torch.zeros_like(gradient) if mine is None else mine), gradient, floor))
    return worst


def _apart(found: Tensor, expected: Tensor, floor: float = 1e-3) -> float:
    found, expected = found.detach(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=floor))

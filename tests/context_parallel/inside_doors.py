"""Doors without the rest of the axis: attention inside of them gathers keys and values, as plainly as can be."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_5d.context_parallel.cut import SequenceCut
from lightning_5d.context_parallel.doors import Doors
from lightning_5d.context_parallel.hugging_face_loss import answer_loss
from lightning_5d.context_parallel.inside import Inside
from lightning_5d.tensor_parallel.axis import open_axis


class _Gather(torch.autograd.Function):
    """All tokens; backward: the sum of the ranks' gradients, of which this rank's part."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, inside: Inside) -> Tensor:
        ctx.inside = inside
        return inside.sequence.gather(local, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        sequence = ctx.inside.sequence
        return sequence.part(sequence.axis.sum(grad), 2), None


class Plain(TorchFunctionMode):
    """Attention over all tokens, and losses of whole sequences."""

    def __init__(self, inside: Inside) -> None:
        self.inside = inside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside.paused:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        answer = answer_loss(self.inside, func, args, kwargs)
        return func(*args, **kwargs) if answer is NotImplemented else answer

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, **kwargs: Any) -> Tensor:
        sequence = self.inside.sequence
        k, v = _Gather.apply(k, self.inside), _Gather.apply(v, self.inside)
        here, there = sequence.positions(q.device)[0], torch.arange(sequence.cut.length)
        seen = there[None] <= here[:, None] if is_causal else torch.ones(len(here), len(there), dtype=torch.bool)
        if self.inside.documents is not None:
            documents = self.inside.documents
            seen = seen & (sequence.part(documents, 1)[:, :, None] == documents[:, None, :])[:, None]
        return F.scaled_dot_product_attention(q, k, v, **{**kwargs, "attn_mask": seen})


def doors_of(module: nn.Module, *, contiguous: bool = False, **options: Any) -> Doors:
    """The doors of a module on all ranks of the pool."""
    axis = open_axis(dist.group.WORLD)  # type: ignore[arg-type]
    balance = "contiguous" if contiguous else "zigzag"
    return Doors(module, axis, lambda length: SequenceCut(length, axis.size, balance), Plain, **options)


def averaged(module: nn.Module) -> dict[str, Tensor]:
    """Gradients, as data parallelism over the ranks gives them."""
    found = {}
    for name, parameter in module.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(grad)
        found[name] = grad / dist.get_world_size()
    return found


Step = Callable[[Any, Any], Any]


def compare(module: nn.Module, step: Step, batch: Any, **options: Any) -> Any:
    """Asserts that a step in doors, forward and backward, is that of one process; returns what it returned."""
    reference = copy.deepcopy(module)
    whole = step(reference, batch)
    whole.backward()
    doors = doors_of(module, **options)
    try:
        with doors.step((batch, 0), {}):
            loss = step(module, batch)
            loss.backward()
        assert doors.inside is None
    finally:
        doors.close()
    torch.testing.assert_close(loss.detach(), whole.detach(), rtol=1e-5, atol=1e-6)
    for name, grad in averaged(module).items():
        expected = dict(reference.named_parameters())[name].grad
        expected = torch.zeros_like(grad) if expected is None else expected
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    return loss


@contextmanager
def causal_masks() -> Iterator[None]:
    """Hugging Face's masks become none: its attention is then causal where the model is."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as functions

    before = functions["sdpa"]
    functions["sdpa"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        functions["sdpa"] = before


def tokens(rows: int, length: int, vocabulary: int = 13, seed: int = 1) -> Tensor:
    """Token ids."""
    return torch.randint(1, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))

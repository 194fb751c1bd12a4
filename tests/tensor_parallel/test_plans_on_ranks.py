"""Layouts made from plans, put to work by real ranks: every rank's gradients are its part of those of one process."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_5d import ParallelPlan
from lightning_5d.plan import find_plan
from lightning_5d.tensor_parallel.axis import open_axis
from lightning_5d.tensor_parallel.layers import install
from lightning_5d.tensor_parallel.plan import layout_of
from tests.tensor_parallel.models import (
    ENCODER_PLAN,
    HUGGING_FACE,
    POST_NORM_PLAN,
    Attention,
    Encoder,
    Holder,
    PostNormAttention,
    hugging_face,
    with_adapters,
)

CASES = {kind: (lambda kind=kind: Holder(hugging_face(kind)).eval(), None) for kind in HUGGING_FACE} | {
    "one KV head": (lambda: Encoder(lambda: Attention(16, 4, 1)), ENCODER_PLAN),
    "tied": (lambda: Encoder(tied=True), ENCODER_PLAN),
    "adapters": (lambda: with_adapters(Encoder()), ENCODER_PLAN),
    "residual beside the row layer": (lambda: Encoder(PostNormAttention), POST_NORM_PLAN),
}


def loss(module: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    out = module(ids)
    return F.cross_entropy(getattr(out, "logits", out).flatten(0, 1), labels.flatten())


def worst_differences(rank: int, names: list[str], sequence: bool) -> dict[str, float]:
    """Of the losses and gradients of each case, relative to the largest gradient."""
    axis = open_axis(dist.group.WORLD)
    try:
        return {name: worst_difference(*CASES[name], axis, sequence) for name in names}
    finally:
        axis.close()


def worst_difference(make, plan, axis, sequence) -> float:
    whole = make()
    module = copy.deepcopy(whole)
    layout, problems = layout_of(module, find_plan(module, plan and ParallelPlan(tensor=plan)), axis.size, sequence)
    assert not problems
    ids, labels = torch.randint(0, 13, (2, 2, 7), generator=torch.Generator().manual_seed(1))
    wanted = loss(whole, ids, labels)
    wanted.backward()
    for name, parameter in module.named_parameters():
        if name in layout.weights:
            parameter.data = layout.weights[name].part(parameter.data, axis.rank, axis.size).clone()
    installed = install(module, layout, axis, sequence)
    got = loss(module, ids, labels)
    got.backward()
    installed.close()
    gradients = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    worst = abs(float(got) - float(wanted))
    for name, parameter in module.named_parameters():
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        rows = layout.weights.get(name)
        if name in layout.partial:
            own = axis.sum(own)
        if rows is not None and rows.copies > 1:
            parts = axis.gather(own.unsqueeze(0), 0)
            first = axis.rank // rows.copies * rows.copies
            own = parts[first : first + rows.copies].sum(0)
        expected = gradients.get(name, torch.zeros_like(whole.get_parameter(name)))
        part = expected if rows is None else rows.part(expected, axis.rank, axis.size)
        worst = max(worst, float((own - part).abs().max()) / largest)
    return worst


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_two_ranks_train_as_one(ranks, sequence):
    for worst in ranks(2, worst_differences, list(CASES), sequence, backend="gloo"):
        assert max(worst.values()) < 3e-6, worst


def test_four_ranks_share_two_key_value_heads(ranks):
    for worst in ranks(4, worst_differences, ["Llama", "Cohere", "one KV head"], True, backend="gloo"):
        assert max(worst.values()) < 3e-6, worst

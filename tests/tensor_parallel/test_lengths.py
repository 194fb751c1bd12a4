"""A piece of a sequence says how long the whole is, from module to module and from stage to stage."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_5d.module_casting import ModuleCasting
from lightning_5d.pipeline_parallel.payload import PayloadSpec, take_apart
from lightning_5d.tensor_parallel.doors import WholeHook
from lightning_5d.whole_length import length_on, mark


def test_a_payload_arrives_with_the_lengths_that_it_was_sent_with() -> None:
    payload = {"hidden": mark(torch.ones(2, 4, 3), 7), "mask": torch.ones(2, 8)}
    tensors, spec = take_apart(payload, 0)
    arrived = spec.together([tensor.clone() for tensor in tensors])
    assert length_on(arrived["hidden"]) == 7
    assert length_on(arrived["mask"]) is None


def test_a_payload_of_another_length_does_not_fit_what_was_agreed() -> None:
    _, spec = take_apart(mark(torch.ones(2, 4, 3), 7), 0)
    (leaf,) = spec.tensors
    assert spec.fits(PayloadSpec((leaf,)))
    assert not spec.fits(PayloadSpec((replace(leaf, whole=8),)))


class Piece(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return mark(x * self.weight, 7)


def test_what_leaves_a_block_in_fp32_keeps_its_length() -> None:
    root = nn.Sequential(Piece())
    casting = ModuleCasting(root, [root[0]], torch.bfloat16)
    with casting.step():
        out = root[0](torch.ones(2, 4, 3))
    assert out.dtype is torch.float32
    assert length_on(out) == 7


class Output(NamedTuple):
    hidden: Tensor
    losses: dict[str, Tensor]


def test_what_a_last_block_returns_beside_the_sequence_stays_as_it_is() -> None:
    joins: Any = SimpleNamespace(whole=lambda piece: torch.cat([piece, piece], 1))
    losses = {"z": torch.tensor(2.0)}
    output = WholeHook(joins)(nn.Identity(), (torch.ones(1, 2, 3),), {}, Output(torch.ones(1, 2, 3), losses))
    assert type(output) is Output
    assert output.hidden.shape == (1, 4, 3)
    assert output.losses["z"] is losses["z"]

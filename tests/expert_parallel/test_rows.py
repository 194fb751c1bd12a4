"""Rows go to experts and come back on the ranks of the tensor axis as in one process, whoever has which rows, and of which experts."""

from collections.abc import Iterator
from itertools import product
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_5d import TensorParallel
from lightning_5d.context_parallel.cut import Balance, SequenceCut
from lightning_5d.expert_parallel.config import MoEConfig
from lightning_5d.expert_parallel.experts import Experts as OwnExperts
from lightning_5d.expert_parallel.microbatch_rows import MicrobatchRows
from lightning_5d.expert_parallel.rows import through_rows
from lightning_5d.mesh import AXES
from lightning_5d.parallelism import RunContext
from lightning_5d.tensor_parallel.axis import TensorAxis, open_axis
from lightning_5d.tensor_parallel.rows import Rows
from lightning_5d.tensor_parallel.shards import features
from tests.ranks.pool import RankPool

EXPERTS, TOP_K, HIDDEN, INNER = 4, 2, 5, 12


class Experts(nn.Module):
    """All experts on all rows, of which the chosen ones are added up."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER, generator=generator))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor, kept: Tensor | None = None) -> Tensor:
        gate, up = torch.einsum("nd,eid->nei", hidden, self.gate_up_proj).chunk(2, -1)
        out = torch.einsum("nei,edi->ned", F.silu(gate) * up, self.down_proj)
        weights = weights if kept is None else weights * kept
        return (out.gather(1, index[..., None].expand(-1, -1, HIDDEN)) * weights[..., None]).sum(1)


def parts(size: int) -> dict[str, Rows]:
    """How ranks cut experts: a share of gate and of up each."""
    return {"gate_up_proj": features(1, 2 * INNER, 2, size), "down_proj": features(2, INNER, 1, size)}


def _batch(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    hidden, of_out = torch.randn(2, rows, HIDDEN, generator=generator).unbind()
    weights = torch.rand(rows, TOP_K, generator=generator)
    index = torch.rand(rows, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    return hidden, index, weights, torch.rand(rows, TOP_K, generator=generator) > 0.3, of_out


def _cases() -> Iterator[tuple[int, bool, bool, bool]]:
    yield from product((7, 8, 1, 0), (False, True), (False, True), (False, True))


def _rows(rank: int, shared_memory: bool) -> None:
    axis = open_axis(dist.group.WORLD, shared_memory=shared_memory)  # type: ignore[arg-type]
    for count, is_cut, has_parts, drops in _cases():
        _compare(axis, count, is_cut, has_parts, drops)
    axis.close()


def _compare(axis: TensorAxis, count: int, is_cut: bool, has_parts: bool, drops: bool) -> None:
    rank, size = axis.rank, axis.size
    hidden, index, weights, kept, of_out = _batch(count * size if is_cut else count)
    whole = Experts()
    inputs = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    expected = whole(inputs[0], index, inputs[1], kept if drops else None)
    (expected * of_out).sum().backward()

    here = slice(rank * count, (rank + 1) * count) if is_cut else slice(None)
    experts = Experts()
    rows = parts(size)
    if has_parts:
        for name, form in rows.items():
            setattr(experts, name, nn.Parameter(form.part(getattr(experts, name).data, rank, size)))
    mine = hidden[here].clone().requires_grad_(), weights[here].clone().requires_grad_()
    sent: list[int] = []

    def compute(*given: Tensor | None) -> Tensor:
        sent.append(len(given[0]))  # type: ignore[arg-type]
        out: Tensor = experts(*given)
        return out

    given = mine[0], index[here], mine[1], kept[here] if drops else None
    out = through_rows(*given, compute, axis, is_cut=is_cut, has_parts=has_parts)
    with torch.no_grad():
        again = through_rows(*given, compute, axis, is_cut=is_cut, has_parts=has_parts)
    (out * of_out[here]).sum().backward()
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out, expected[here], **close)
    torch.testing.assert_close(again, out, rtol=0, atol=0)
    for grad, wanted in zip(mine, inputs, strict=True):
        torch.testing.assert_close(grad.grad, wanted.grad[here], **close)  # type: ignore[index]
    limit = -(-count // size) if not (is_cut or has_parts) else count * size if is_cut and has_parts else count
    assert max(sent) <= limit
    for name, form in rows.items():
        got = getattr(experts, name).grad
        wanted = getattr(whole, name).grad
        if has_parts:
            wanted = form.part(wanted, rank, size)
        else:
            dist.all_reduce(got)
            wanted = wanted if count else torch.zeros_like(wanted)
        torch.testing.assert_close(got, wanted, **close)


@pytest.mark.parametrize(("size", "shared_memory"), [(2, True), (3, True), (2, False)])
def test_every_case_gives_values_and_gradients_of_one_process(ranks: RankPool, size: int, shared_memory: bool) -> None:
    ranks(size, _rows, shared_memory, backend="gloo", timeout=30)


def _seconds(rank: int) -> None:
    axis = open_axis(dist.group.WORLD)  # type: ignore[arg-type]
    hidden, index, weights, _, _ = _batch(4)
    out = through_rows(hidden.requires_grad_(), index, weights, None, Experts(), axis)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(out.square().sum(), hidden, create_graph=True)


def test_second_derivatives_are_refused(ranks: RankPool) -> None:
    ranks(2, _seconds, backend="gloo", timeout=30)


def test_one_rank_alone_sends_all_rows() -> None:
    hidden, index, weights, kept, _ = _batch(5)
    out = through_rows(hidden, index, weights, kept, Experts(), None)
    torch.testing.assert_close(out, Experts()(hidden, index, weights, kept))


class Mixed(nn.Module):
    """A shared expert and others in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)
        self.experts = OwnExperts(HIDDEN, MoEConfig(experts=EXPERTS, top_k=TOP_K, intermediate_size=INNER))

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(TOP_K)
        out: Tensor = self.experts(x, index, weights) + self.down(F.silu(self.up(x)))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mixed()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(x)
        return out


class Model(nn.Module):
    parallel_plan: ClassVar[dict[str, str]] = {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))


@pytest.mark.parametrize("sequence", [False, True])
def test_experts_inside_of_a_region_are_refused(sequence: bool) -> None:
    sizes = {**dict.fromkeys(AXES, 1), "tp": 2}
    context = RunContext(2, 1, "cpu", "32-true", sizes, Model())
    problems = TensorParallel(2, sequence_parallel=sequence).validate(context)
    (problem, *_) = [each for each in problems if "experts" in each.what]
    assert "blocks.0.mlp.experts are inside of blocks.0.mlp" in problem.what
    assert "beside the experts" in problem.fix


LAYOUTS = [
    MicrobatchRows(7, 3),
    MicrobatchRows(1, 3),
    *(
        MicrobatchRows(cut.local, pieces, cut)
        for length, size, pieces in [(13, 2, 1), (13, 2, 2), (8, 2, 2), (9, 3, 2), (5, 3, 4)]
        for balance in ("zigzag", "contiguous")
        for cut in [SequenceCut(length, size, balance)]
    ),
]


@pytest.mark.parametrize("rows", LAYOUTS, ids=str)
@pytest.mark.parametrize("sequences", [1, 3])
def test_rows_of_all_ranks_are_the_sequences_without_padding(rows: MicrobatchRows, sequences: int) -> None:
    whole = torch.arange(sequences * rows.length)[:, None] + 1
    parts = [rows.part(whole, rank, fill=0) for rank in range(rows.ranks)]
    assert {len(part) for part in parts} == {sequences * rows.local}
    torch.testing.assert_close(rows.whole(parts), whole)
    for rank, part in enumerate(parts):
        real = rows.real(rank, len(part))
        torch.testing.assert_close(part[:, 0] > 0, torch.ones(len(part), dtype=torch.bool) if real is None else real)


def test_rows_are_in_the_order_in_which_axes_cut_a_sequence() -> None:
    balance: Balance = "zigzag"
    rows = MicrobatchRows(4, 2, SequenceCut(8, 2, balance))
    # Chunks 0 and 3 of 4 on the first context rank, each piece of two tokens on one rank of the tensor axis; of two sequences.
    whole = torch.arange(16)[:, None]
    assert [rows.part(whole, rank)[:, 0].tolist() for rank in range(4)] == [
        [0, 1, 8, 9],
        [6, 7, 14, 15],
        [2, 3, 10, 11],
        [4, 5, 12, 13],
    ]


def test_rows_that_are_not_all_tokens_of_a_sequence_are_refused() -> None:
    with pytest.raises(ValueError, match="7 rows where each rank has 4 tokens"):
        MicrobatchRows(8, 2).sequences(7)

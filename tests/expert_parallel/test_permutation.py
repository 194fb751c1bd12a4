"""Rows sorted by expert, and the weighted sums of what becomes of them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_5d.expert_parallel import permutation
from lightning_5d.expert_parallel.permutation import gather_rows, sort_choices, weighted_sum

INDEX = torch.tensor([[2, 0], [1, 2], [2, 3], [0, 2]])
KEPT = torch.tensor([[True, True], [False, False], [True, False], [True, True]])


def test_choices_are_sorted_by_expert_and_then_by_token() -> None:
    order = sort_choices(INDEX, 5)
    assert order.counts_E.tolist() == [2, 1, 4, 1, 0]
    assert order.token_S.tolist() == [0, 3, 1, 0, 1, 2, 3, 2]
    assert order.choice_S.tolist() == [1, 6, 2, 0, 3, 4, 7, 5]
    assert order.place_S.tolist() == [3, 0, 2, 4, 5, 7, 1, 6]


def test_choices_that_are_left_out_have_no_row() -> None:
    order = sort_choices(INDEX, 5, KEPT)
    assert order.counts_E.tolist() == [2, 0, 3, 0, 0]
    assert order.token_S.tolist() == [0, 3, 0, 2, 3]
    assert order.bags_N.tolist() == [0, 2, 2, 3]


def test_an_expert_that_does_not_exist_is_no_choice() -> None:
    with pytest.raises(RuntimeError):
        sort_choices(INDEX, 3)


def by_hand(rows: Tensor, weights: Tensor, index: Tensor, kept: Tensor | None) -> Tensor:
    """Choice by choice: their rows come by expert, those of one expert by token."""
    kept = torch.ones_like(index, dtype=torch.bool) if kept is None else kept
    choices = sorted((int(index[n, k]), n, k) for n, k in kept.nonzero().tolist())
    total = [(rows.sum(0) + weights.sum()) * 0 for _ in index]
    for row, (_, n, k) in enumerate(choices):
        total[n] = total[n] + rows[row] * weights[n, k]
    return torch.stack(total)


@pytest.mark.parametrize("kept", [None, KEPT, torch.zeros_like(KEPT)], ids=["all", "some", "none"])
@pytest.mark.parametrize(("trains_rows", "trains_weights"), [(True, True), (True, False), (False, True)])
def test_sums_and_their_gradients(
    kept: Tensor | None, trains_rows: bool, trains_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(permutation, "_PIECE", 9)  # three rows at a time
    order = sort_choices(INDEX, 5, kept)
    rows = torch.randn(len(order.token_S), 3, dtype=torch.float64, requires_grad=trains_rows)
    weights = torch.rand(4, 2, dtype=torch.float64, requires_grad=trains_weights)
    trained = [x for x in (rows, weights) if x.requires_grad]
    results = []
    for out in (weighted_sum(rows, weights, order, torch.float64), by_hand(rows, weights, INDEX, kept)):
        of_each = torch.autograd.grad(out.cos().sum(), trained, materialize_grads=True)
        results.append([out, *of_each])
    torch.testing.assert_close(*results)


def test_the_gradient_of_a_token_is_the_sum_of_those_of_its_rows() -> None:
    hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    for kept in (None, KEPT):
        order = sort_choices(INDEX, 5, kept)
        rows = gather_rows(hidden, order)
        assert torch.equal(rows, hidden[order.token_S])
        torch.testing.assert_close(
            torch.autograd.grad(rows.cos().sum(), hidden),
            torch.autograd.grad(hidden[order.token_S].cos().sum(), hidden),
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_rows_are_added_up_in_32(dtype: torch.dtype) -> None:
    index = torch.arange(64).view(1, 64)
    rows = torch.full((64, 2), 1.0, dtype=dtype)
    rows[0] = 2048.0
    assert weighted_sum(rows, torch.ones(1, 64), sort_choices(index, 64), dtype)[0, 0] == 2112.0  # 2048 and 63
    weights = torch.rand(1, 64, requires_grad=True)
    out = weighted_sum(rows, weights, sort_choices(index, 64), torch.float32)
    assert out.dtype == torch.float32
    out.sum().backward()
    assert torch.equal(weights.grad, rows.float().sum(1)[None])  # type: ignore[arg-type]


def _saved(function: Any) -> int:
    """Bytes of floating-point numbers that a forward saves."""
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.is_floating_point():
            found[x.data_ptr()] = x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function()
    return sum(found.values())


def test_of_a_size_of_rows_only_what_came_back_is_saved_and_only_for_weights_that_train() -> None:
    order = sort_choices(INDEX, 5)
    hidden, weights = torch.randn(4, 100, requires_grad=True), torch.rand(4, 2)
    assert _saved(lambda: weighted_sum(gather_rows(hidden, order), weights, order, torch.float32)) == weights.nbytes
    weights.requires_grad_()
    rows = gather_rows(hidden, order)
    assert _saved(lambda: weighted_sum(rows, weights, order, torch.float32)) == weights.nbytes + rows.nbytes

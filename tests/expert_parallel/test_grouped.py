"""Grouped products are those of a plain loop over the experts, whichever way they are computed, and so are their gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_5d.expert_parallel import grouped
from lightning_5d.expert_parallel.grouped import grouped_linear
from lightning_5d.model_flops import ModelFlops
from lightning_5d.pipeline_parallel.deferred_weights import DeferredWeights
from lightning_5d.saved_operations import SavedOperations

COUNTS = [[3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0]]
FITTING, ODD = (8, 16), (7, 5)


def operands(sizes: tuple[int, int], counts: list[int], dtype: torch.dtype) -> tuple[Tensor, nn.Parameter, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), sizes[0], generator=generator).to(dtype).requires_grad_()
    weights = torch.randn(len(counts), sizes[1], sizes[0], generator=generator).to(dtype)
    return rows, nn.Parameter(weights), torch.tensor(counts)


def by_loop(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    parts = rows.split(counts.tolist())
    return torch.cat([part @ weight.t() for part, weight in zip(parts, weights, strict=True)])


def gradients(
    product: Callable[[Tensor, Tensor, Tensor], Tensor], rows: Tensor, weights: Tensor, counts: Tensor
) -> list[Tensor]:
    out = product(rows, weights, counts)
    return [out.detach(), *torch.autograd.grad(out.float().cos().sum(), (rows, weights))]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("sizes", [FITTING, ODD], ids=["fitting", "odd"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str
)
def test_values_and_gradients_are_those_of_a_loop(
    sizes: tuple[int, int], counts: list[int], dtype: torch.dtype, tolerance: float
) -> None:
    rows, weights, numbers = operands(sizes, counts, dtype)
    found = gradients(grouped_linear, rows, weights, numbers)
    for x, y in zip(found, gradients(by_loop, rows, weights, numbers), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance * float(y.abs().max()) if y.numel() else 0)
    for expert, count in enumerate(counts):
        assert count or not found[2][expert].any()
    with torch.no_grad():
        assert torch.equal(grouped_linear(rows, weights, numbers), found[0])
    with torch.inference_mode():
        assert torch.equal(grouped_linear(rows, weights, numbers), found[0])


def test_torchs_product_is_used_where_it_fits_and_gives_what_the_loop_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weights, numbers = operands(FITTING, COUNTS[0], torch.float32)
    torchs, calls = torch.nn.functional.grouped_mm, []
    monkeypatch.setattr(grouped.F, "grouped_mm", lambda *args, **kwargs: calls.append(1) or torchs(*args, **kwargs))
    first = gradients(grouped_linear, rows, weights, numbers)
    assert len(calls) == 3
    gradients(grouped_linear, *operands(ODD, COUNTS[0], torch.float32))
    monkeypatch.setattr(grouped, "_NATIVE", ())
    for x, y in zip(first, gradients(grouped_linear, rows, weights, numbers), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
    assert len(calls) == 3


def test_first_and_second_derivatives_are_right() -> None:
    rows, weights, numbers = operands((3, 2), [2, 0, 1], torch.float64)
    turned = weights.detach().transpose(1, 2).contiguous().requires_grad_()
    for product, matrices in (
        (lambda x, w: grouped_linear(x, w, numbers), weights),
        (lambda x, w: grouped_linear(x, w.transpose(1, 2), numbers), turned),
    ):
        assert torch.autograd.gradcheck(product, (rows, matrices))
        assert torch.autograd.gradgradcheck(product, (rows, matrices))


def test_gradients_lie_as_the_matrices_do_and_need_not_come_close_together() -> None:
    rows, weights, numbers = operands(FITTING, COUNTS[0], torch.float32)
    turned = nn.Parameter(weights.detach().transpose(1, 2).contiguous())
    out = grouped_linear(rows, turned.transpose(1, 2), numbers)
    out.sum().backward()  # of which the gradient is one number, repeated
    assert turned.grad is not None
    assert turned.grad.stride() == turned.stride()
    expected = by_loop(rows, weights, numbers)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    (expected,) = torch.autograd.grad(expected.sum(), weights)
    torch.testing.assert_close(turned.grad.transpose(1, 2), expected, rtol=1e-6, atol=1e-5)


def test_autocast_multiplies_in_its_dtype_and_gradients_keep_theirs() -> None:
    rows, weights, numbers = operands(FITTING, COUNTS[0], torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(grouped_linear, rows, weights, numbers)
        expected = gradients(by_loop, rows, weights, numbers)
    assert [x.dtype for x in found] == [x.dtype for x in expected] == [torch.bfloat16, torch.float32, torch.float32]
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2 * float(y.abs().max()))


def test_numbers_that_do_not_fit_are_refused() -> None:
    rows, weights, _ = operands(FITTING, COUNTS[0], torch.float32)
    with pytest.raises(ValueError, match="9 rows and 4 matrices, but 4 numbers of rows that add up to 8"):
        grouped_linear(rows, weights, torch.tensor([3, 0, 5, 0]))


@pytest.mark.parametrize("sizes", [FITTING, ODD], ids=["fitting", "odd"])
def test_operations_count_as_those_of_one_linear_layer_over_the_same_rows(sizes: tuple[int, int]) -> None:
    rows, weights, numbers = operands(sizes, COUNTS[0], torch.float32)
    linear = nn.Linear(*sizes, bias=False)
    for x, trained in ((rows, True), (rows.detach(), True), (rows, False), (rows.detach(), False)):
        linear.requires_grad_(trained)
        with ModelFlops() as expected:
            linear(x)
        with ModelFlops() as found:
            grouped_linear(x, weights.requires_grad_(trained), numbers)
        assert found.total == expected.total > 0
    with torch.no_grad(), ModelFlops() as torchs:
        torch.nn.functional.grouped_mm(
            *(x.detach() for x in (operands(FITTING, COUNTS[0], torch.float32)[0], torch.randn(4, 8, 16))),
            offs=numbers.cumsum(0).int(),
        )
    assert torchs.total == 2 * 9 * 8 * 16


@pytest.mark.parametrize(("sizes", "kept"), [(FITTING, 1), (ODD, 0)], ids=["fitting", "odd"])
def test_recomputation_may_keep_what_torchs_product_returns(sizes: tuple[int, int], kept: int) -> None:
    rows, weights, numbers = operands(sizes, COUNTS[0], torch.float32)
    asked: list[bool] = []

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        answer = SavedOperations()(context, operation, *args, **kwargs)
        asked.append(answer == CheckpointPolicy.MUST_SAVE)
        return answer

    def checkpointed(*args: Tensor) -> Tensor:
        context = partial(create_selective_checkpoint_contexts, policy)
        out: Tensor = checkpoint(lambda *x: grouped_linear(*x).sin(), *args, use_reentrant=False, context_fn=context)  # type: ignore[assignment]
        return out

    found = gradients(checkpointed, rows, weights, numbers)
    expected = gradients(lambda *x: grouped_linear(*x).sin(), rows, weights, numbers)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert sum(asked) == kept


@pytest.mark.parametrize("turned", [False, True], ids=["as linear layers", "transposed"])
@pytest.mark.parametrize("sizes", [FITTING, ODD], ids=["fitting", "odd"])
def test_a_schedule_can_leave_the_gradients_of_matrices_for_later(turned: bool, sizes: tuple[int, int]) -> None:
    rows, weights, numbers = operands(sizes, COUNTS[0], torch.float32)
    _, of_rows, of_weights = gradients(grouped_linear, rows, weights, numbers)
    if turned:
        weights, of_weights = nn.Parameter(weights.detach().transpose(1, 2).contiguous()), of_weights.transpose(1, 2)
    deferred = DeferredWeights([])
    for times in (1, 2):
        rows.grad = None
        out = grouped_linear(rows, weights.transpose(1, 2) if turned else weights, numbers)
        with deferred.collecting() as queue:
            out.cos().sum().backward()
        assert len(queue) == 1
        assert (weights.grad is None) == (times == 1)
        torch.testing.assert_close(rows.grad, of_rows)
        queue.run()
        torch.testing.assert_close(weights.grad, times * of_weights, rtol=1e-6, atol=1e-5)
        assert weights.grad is not None
        assert not weights.grad[1].any()
    assert DeferredWeights.collecting_now() is None

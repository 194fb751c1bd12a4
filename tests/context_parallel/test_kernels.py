"""Kernels give what a softmax gives, also of a part of the keys."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_5d.context_parallel import kernels

CPU_TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif("not torch.cuda.is_available()")])]


def inputs(heads: tuple[int, int] = (4, 2), queries: int = 6, keys: int = 6, size: int = 8) -> list[Tensor]:
    random = torch.Generator().manual_seed(queries)
    shapes = [
        (2, heads[0], queries, size),
        (2, heads[1], keys, size),
        (2, heads[1], keys, size),
        (2, heads[0], queries, size),
    ]
    return [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]


def by_hand(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.mT * scale).masked_fill(~pairs, -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    return weights @ v, lse


def check(
    whole: list[Tensor], pairs: Tensor, causal: bool, mask: Tensor | None, dtype: torch.dtype, device: str
) -> None:
    whole = [x.to(dtype).double() for x in whole]
    q, k, v = (x.clone().requires_grad_() for x in whole[:3])
    out, lse = by_hand(q, k, v, pairs, 0.4)
    expected = torch.autograd.grad(out, (q, k, v), whole[3])
    near = [x.to(device, dtype) for x in whole]
    mask = None if mask is None else mask.to(device)
    own, own_lse = kernels.forward(*near[:3], causal=causal, mask=mask, scale=0.4)
    assert own.dtype == dtype
    assert own_lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(own.double().cpu(), out.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(own_lse.double().cpu(), lse.detach(), rtol=tolerance, atol=tolerance)
    grads = kernels.backward(near[3], *near[:3], own, kernels.blind(own_lse), causal=causal, mask=mask, scale=0.4)
    for name, a, b in zip("qkv", grads, expected, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(
            a.double().cpu(), b, rtol=2 * tolerance, atol=2 * tolerance, msg=lambda m, n=name: f"d{n}: {m}"
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", CPU_TYPES)
def test_values_and_gradients(dtype: torch.dtype, device: str) -> None:
    if device != "cpu" and dtype == torch.float64:
        pytest.skip("no kernel")
    for heads in ((4, 4), (4, 2), (4, 1)):
        whole = inputs(heads)
        check(whole, torch.ones(6, 6, dtype=torch.bool), False, None, dtype, device)
        check(whole, torch.ones(6, 6, dtype=torch.bool).tril(), True, None, dtype, device)
        check(inputs(heads, 5, 9), torch.ones(5, 9, dtype=torch.bool), False, None, dtype, device)
        mask = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(1)) < 0.6
        mask[0, 0, 2] = False  # sees nothing
        check(whole, mask, False, mask, dtype, device)
        check(whole, mask[:1], False, mask[:1], dtype, device)


def test_a_query_that_sees_nothing_is_zero_and_gives_no_gradient() -> None:
    q, k, v, grad = (x.float() for x in inputs())
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    mask[..., 3, :] = False
    out, lse = kernels.forward(q, k, v, mask=mask, scale=1.0)
    assert not out[:, :, 3].any()
    assert (lse[:, :, 3] == -math.inf).all()
    assert lse[:, :, :3].isfinite().all()
    dq, dk, dv = kernels.backward(grad, q, k, v, out, kernels.blind(lse), mask=mask, scale=1.0)
    assert not dq[:, :, 3].any()
    rows = [0, 1, 2, 4, 5]
    _, k_alone, v_alone = kernels.backward(
        grad[:, :, rows], q[:, :, rows], k, v, out[:, :, rows], lse[:, :, rows], scale=1.0
    )
    torch.testing.assert_close(dk, k_alone)
    torch.testing.assert_close(dv, v_alone)


def test_any_strides_give_the_same() -> None:
    q, k, v, grad = (x.float() for x in inputs((4, 2), 16, 16))
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, grad)]
    across = [x.mT.contiguous().mT for x in (q, k, v, grad)]  # a head's numbers are not side by side
    out, lse = kernels.forward(q, k, v, causal=True, scale=0.3)
    grads = kernels.backward(grad, q, k, v, out, lse, causal=True, scale=0.3)
    for a, b, c, g in (turned, across):
        again, lse_again = kernels.forward(a, b, c, causal=True, scale=0.3)
        assert torch.equal(again, out)
        assert torch.equal(lse_again, lse)
        for x, y in zip(kernels.backward(g, a, b, c, again, lse_again, causal=True, scale=0.3), grads, strict=True):
            assert torch.equal(x, y)
    everywhere = torch.ones(()).expand_as(grad)  # the gradient of a sum
    for x, y in zip(
        kernels.backward(everywhere, q, k, v, out, lse, causal=True, scale=0.3),
        kernels.backward(torch.ones_like(grad), q, k, v, out, lse, causal=True, scale=0.3),
        strict=True,
    ):
        assert torch.equal(x, y)


@pytest.mark.parametrize("size", [1, 7, 80, 256, 300])
def test_head_sizes(size: int) -> None:
    check(inputs(size=size), torch.ones(6, 6, dtype=torch.bool).tril(), True, None, torch.float64, "cpu")


def test_what_no_kernel_takes_is_refused() -> None:
    q, k, v, _ = (x.float() for x in inputs())
    with pytest.raises(ValueError, match="head size 5 is not the queries' 8"):
        kernels.forward(q, k, v[..., :5], scale=1.0)
    with pytest.raises(ValueError, match=r"No attention kernel with log-sum-exp takes torch\.float32 on meta"):
        kernels.forward(q.to("meta"), k.to("meta"), v.to("meta"), scale=1.0)
    a, b, c = kernels.same_head_size(q, k, v[..., :5])
    out, _ = kernels.forward(a, b, c, scale=1.0)
    torch.testing.assert_close(out[..., :5], kernels.forward(q, k, v, scale=1.0)[0][..., :5])
    assert not out[..., 5:].any()

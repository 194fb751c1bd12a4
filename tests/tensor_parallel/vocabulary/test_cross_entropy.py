# ruff: noqa: B023 - the expressions are run at once
import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_5d.tensor_parallel.vocabulary import VocabularyShard, cross_entropy
from tests.ranks import RankPool
from tests.tensor_parallel.vocabulary.parity import axis, columns, compare, logits, plain

N = 6


def targets(shape: tuple[int, ...], vocabulary: int, ignore: int = -100) -> Tensor:
    drawn = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(5))
    drawn.view(-1)[1] = drawn.view(-1)[4] = ignore
    return drawn


def every_option(rank: int, vocabulary: int) -> None:
    over = axis()
    weight = logits(vocabulary, seed=3).abs()
    for reduction, smoothing, given, ignore in itertools.product(
        ("none", "mean", "sum"), (0.0, 0.1), (None, weight), (-100, 2)
    ):
        dtype = torch.float32 if ignore == 2 else torch.float64
        options: dict[str, Any] = {
            "reduction": reduction,
            "label_smoothing": smoothing,
            "weight": None if given is None else given.to(dtype),
            "ignore_index": ignore,
        }
        tolerance = 1e-10 if dtype == torch.float64 else 1e-5
        flat, folded = targets((N,), vocabulary, ignore), targets((2, N), vocabulary, ignore)
        close = {"rtol": tolerance, "atol": tolerance}
        compare(lambda x: F.cross_entropy(x, flat, **options), logits(N, vocabulary, dtype=dtype), over, **close)
        compare(
            lambda x: F.cross_entropy(x.mT, folded, **options), logits(2, N, vocabulary, dtype=dtype), over, **close
        )


@pytest.mark.parametrize(("size", "vocabulary"), [(2, 7), (4, 13), (4, 61), (4, 5)])
def test_every_option_gives_torchs_loss_and_gradient(ranks: RankPool, size: int, vocabulary: int) -> None:
    ranks(size, every_option, vocabulary)


def other_targets(rank: int) -> None:
    over, vocabulary = axis(), 13
    probabilities = logits(N, vocabulary, seed=7).softmax(-1)
    weight = logits(vocabulary, seed=3).abs()
    for reduction in ("none", "mean", "sum"):
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.2, "weight": weight}
        compare(lambda x: F.cross_entropy(x, probabilities, **options), logits(N, vocabulary), over)
        compare(lambda x: F.cross_entropy(x, probabilities, reduction=reduction), logits(N, vocabulary), over)
        compare(lambda x: F.cross_entropy(x, (2 * x).softmax(-1), reduction=reduction), logits(N, vocabulary), over)
    target = targets((N,), vocabulary)
    compare(lambda x: nn.CrossEntropyLoss(label_smoothing=0.1)(x, target), logits(N, vocabulary), over)
    compare(lambda x: F.cross_entropy(x[0], target[0]), logits(N, vocabulary), over)
    compare(lambda x: F.cross_entropy(x, target, size_average=False), logits(N, vocabulary), over)
    compare(lambda x: F.cross_entropy(x[:0], target[:0], reduction="sum"), logits(N, vocabulary), over)
    compare(lambda x: F.cross_entropy(x, target.to(torch.uint8), ignore_index=156), logits(N, vocabulary), over)
    images = logits(2, 3, 4, vocabulary)
    compare(lambda x: F.cross_entropy(x.permute(0, 3, 1, 2), targets((2, 3, 4), vocabulary)), images, over)
    # Here the classes are tokens, and the vocabulary is what torch takes for a position.
    compare(lambda x: F.cross_entropy(x, targets((2, vocabulary), 3)), logits(2, 3, vocabulary), over)


def test_probabilities_and_all_shapes_of_targets(ranks: RankPool) -> None:
    ranks(4, other_targets)


def extremes(rank: int) -> None:
    over, vocabulary = axis(), 7
    target = torch.tensor([0, 1, 6, 3, 2, 5])
    loss = lambda x: F.cross_entropy(x, target, reduction="none", label_smoothing=0.0)  # noqa: E731
    huge = logits(N, vocabulary, dtype=torch.float32) * 1e4
    compare(loss, huge, over, rtol=1e-6, atol=1e-5)
    compare(loss, huge + 3e37, over, rtol=1e-6, atol=1e-5)
    masked = logits(N, vocabulary)
    masked[:, 4:] = float("-inf")  # all that the last rank has, and some targets
    masked[1] = float("-inf")
    masked[1, 1] = 0.0
    got = compare(loss, masked, over)[0].detach()
    assert got[2] == math.inf
    assert got[1] == 0.0
    for strange in (float("nan"), float("inf")):
        broken = logits(N, vocabulary)
        broken[0, 3] = strange
        wanted = loss(broken).isnan()
        assert torch.equal(
            loss(VocabularyShard.wrap(columns(broken, over), vocabulary=vocabulary, axis=over)).isnan(), wanted
        )
        assert wanted.tolist() == [True] + [False] * (N - 1)


def test_huge_infinite_and_missing_numbers_are_as_in_torch(ranks: RankPool) -> None:
    ranks(2, extremes)
    ranks(4, extremes)


def nothing_counts(rank: int) -> list[float]:
    over = axis()
    local = columns(logits(N, 7), over).requires_grad_()
    shard = VocabularyShard.wrap(local, vocabulary=7, axis=over)
    nothing = torch.full((N,), -100)
    losses = [F.cross_entropy(shard, nothing, reduction=how).sum() for how in ("mean", "sum", "none")]
    losses[1].backward()
    assert torch.equal(local.grad, torch.zeros_like(local))
    return [float(loss.detach()) for loss in losses]


def test_a_batch_in_which_all_is_ignored_is_as_in_torch(ranks: RankPool) -> None:
    for mean, total, each in ranks(2, nothing_counts):
        assert math.isnan(mean)
        assert (total, each) == (0.0, 0.0)


def refused(rank: int) -> list[tuple[type, str]]:
    over, whole = axis(), logits(N, 7)
    shard = VocabularyShard.wrap(columns(whole, over), vocabulary=7, axis=over)
    target = torch.arange(N)
    bad: list[tuple[Tensor, dict[str, Any]]] = [
        (target + 2, {}),
        (target - 7, {}),
        (target[:3], {}),
        (target[:, None], {}),
        (target.int(), {}),
        (target, {"weight": torch.ones(4, dtype=whole.dtype)}),
        (target, {"reduction": "average"}),
        (target, {"label_smoothing": 1.5}),
    ]
    found = []
    for wrong, options in bad:
        with pytest.raises(Exception) as wanted:
            F.cross_entropy(whole, wrong, **options)
        with pytest.raises(type(wanted.value)) as got:
            F.cross_entropy(shard, wrong, **options)
        found.append((type(wanted.value), str(wanted.value), str(got.value)))
    return found


def test_what_torch_refuses_is_refused_in_the_same_way(ranks: RankPool) -> None:
    found, _ = ranks(2, refused)
    assert found[0] == (IndexError, "Target 7 is out of bounds.", "Target 7 is out of bounds.")
    assert found[1] == (IndexError, "Target -7 is out of bounds.", "Target -7 is out of bounds.")
    assert found[2][1] == found[2][2]


def half_precision(rank: int) -> None:
    over, vocabulary = axis(), 61
    target = targets((N,), vocabulary)
    for dtype in (torch.bfloat16, torch.float16):
        exact = logits(N, vocabulary, dtype=dtype).float().requires_grad_()
        wanted = F.cross_entropy(exact, target)
        wanted.backward()
        local = columns(exact, over).to(dtype).requires_grad_()
        shard = VocabularyShard.wrap(local, vocabulary=vocabulary, axis=over)
        got = F.cross_entropy(shard, target)
        got.backward()
        assert got.dtype == dtype
        # Nothing was rounded on the way, but what comes out.
        assert got == wanted.to(dtype)
        assert torch.equal(local.grad, columns(exact.grad, over).nan_to_num(nan=0.0).to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        halves = compare(
            lambda x: F.cross_entropy(x, target),
            logits(N, vocabulary, dtype=torch.bfloat16),
            over,
            rtol=1e-2,
            atol=1e-2,
        )
        compare(
            lambda x: F.cross_entropy(x, target), logits(N, vocabulary, dtype=torch.float32), over, rtol=1e-5, atol=1e-6
        )
    assert halves[0].dtype == torch.float32


def test_half_precision_is_computed_in_float(ranks: RankPool) -> None:
    ranks(2, half_precision)


def with_z_loss(rank: int) -> None:
    over, vocabulary = axis(), 13
    target, weight = targets((N,), vocabulary), logits(vocabulary, seed=3).abs()
    probabilities = logits(N, vocabulary, seed=7).softmax(-1)

    def by_hand(x: Tensor, reduction: str) -> Tensor:
        each = F.cross_entropy(x, target, weight, reduction="none", label_smoothing=0.1)
        each = each + 0.3 * x.logsumexp(-1).square() * (target != -100)
        counted = torch.where(target == -100, 0, weight[target.clamp(min=0)]).sum()
        return each if reduction == "none" else each.sum() / (counted if reduction == "mean" else 1)

    for reduction in ("none", "mean", "sum"):
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 0.3, "weight": weight}
        (got,) = compare(lambda x: cross_entropy(x, target, **options), logits(N, vocabulary), over)
        torch.testing.assert_close(got, by_hand(logits(N, vocabulary), reduction))
        compare(lambda x: cross_entropy(x, probabilities, **options), logits(N, vocabulary), over)


def test_z_loss_is_added_to_each_token_that_counts(ranks: RankPool) -> None:
    ranks(2, with_z_loss)


def sent(rank: int, vocabulary: int, smoothing: float) -> tuple[dict[str, int], dict[str, int]]:
    over = axis()
    local = columns(logits(2, N, vocabulary, dtype=torch.float32), over).requires_grad_()
    shard = VocabularyShard.wrap(local, vocabulary=vocabulary, axis=over)
    flat = shard[:, :-1].float().reshape(-1, vocabulary)
    F.cross_entropy(flat, targets((2 * (N - 1),), vocabulary), label_smoothing=smoothing).backward()
    assert local.grad is not None
    return over.traffic.calls, over.traffic.bytes


@pytest.mark.parametrize(("size", "smoothing", "numbers"), [(2, 0.0, 3), (4, 0.0, 3), (2, 0.1, 4)])
def test_three_numbers_per_token_and_rank_are_sent_whatever_the_vocabulary_is(
    ranks: RankPool, size: int, smoothing: float, numbers: int
) -> None:
    tokens = 2 * (N - 1)
    for vocabulary in (13, 613):
        for calls, sizes in ranks(size, sent, vocabulary, smoothing):
            assert calls == {"all_gather": 1, "reduce_scatter": 0, "all_reduce": 0}
            assert sizes["all_gather"] == size * tokens * numbers * 4


class Sizes(TorchDispatchMode):
    """How large the tensors are that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if type(one) is Tensor}
        result = func(*args, **(kwargs or {}))
        made = [
            one for one in tree_leaves(result) if type(one) is Tensor and one.untyped_storage().data_ptr() not in given
        ]
        self.largest += [one.untyped_storage().nbytes() for one in made]
        return result


def memory(rank: int, dtype: torch.dtype) -> tuple[int, list[int], list[int]]:
    local = torch.randn(512, 4096, dtype=torch.float32).to(dtype).requires_grad_()
    shard, target = VocabularyShard.wrap(local, vocabulary=4095, axis=axis()), torch.arange(512)
    with Sizes() as forward:
        loss = F.cross_entropy(shard, target)
    with Sizes() as backward:
        loss.backward()
    return local.nbytes, forward.largest, backward.largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_keeps_nothing_of_the_logits_size_and_backward_makes_the_gradient_alone(
    ranks: RankPool, dtype: torch.dtype
) -> None:
    ((size, forward, backward),) = ranks(1, memory, dtype)
    assert max(forward) <= 2**20
    assert [made for made in backward if made > 2**20] == [size]


def twice(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    over = axis()
    local = columns(logits(N, 13, dtype=torch.float32), over).requires_grad_()
    shard = VocabularyShard.wrap(local, vocabulary=13, axis=over)
    loss = F.cross_entropy(shard, targets((N,), 13), label_smoothing=0.1)
    (first,) = torch.autograd.grad(loss, local, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(loss, local)
    assert torch.equal(first, kept)
    assert torch.equal(second, kept)
    return loss.detach(), plain(shard), plain(shard.softmax(-1))


def test_a_graph_may_be_gone_through_twice_and_ranks_agree_in_every_bit(ranks: RankPool) -> None:
    first, *others = ranks(4, twice)
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def changed_after(rank: int) -> None:
    over = axis()
    local = columns(logits(N, 13), over).requires_grad_()
    shard = VocabularyShard.wrap(local * 1, vocabulary=13, axis=over)
    loss = F.cross_entropy(shard, targets((N,), 13))
    shard.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_logits_changed_between_loss_and_backward_are_noticed(ranks: RankPool) -> None:
    ranks(2, changed_after)

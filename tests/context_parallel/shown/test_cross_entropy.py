# ruff: noqa: B023 - the expressions are run at once
import itertools
import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_5d.context_parallel.cut import Balance
from lightning_5d.context_parallel.shown import SequenceShard, local_cross_entropy
from lightning_5d.tensor_parallel.axis import CollectiveAxis
from lightning_5d.tensor_parallel.vocabulary import VocabularyShard, cross_entropy
from tests.context_parallel.shown.parity import compare, numbers, sequence
from tests.ranks import RankPool
from tests.tensor_parallel.vocabulary.parity import columns

B, V = 2, 7
LAYOUTS: list[tuple[int, Balance, int]] = [(2, "zigzag", 9), (4, "contiguous", 5)]  # of the last one rank holds nothing


def labels(length: int, ignore: int = -100) -> Tensor:
    """Nearly all valid ones are at the start: some ranks have few or none."""
    drawn = torch.randint(V, (B, length), generator=torch.Generator().manual_seed(5))
    drawn[:, 1] = drawn[0, 3:] = drawn[1, 2:] = ignore
    return drawn


def every_option(rank: int, length: int, balance: Balance) -> None:
    over, weight, x = sequence(length, balance), numbers(V, seed=3).abs(), numbers(B, length, V)
    probabilities = numbers(B * length, V, seed=7).softmax(-1)
    for reduction, smoothing, given in itertools.product(("none", "mean", "sum"), (0.0, 0.1), (None, weight)):
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing, "weight": given}
        ignore = -100 if given is None else 2
        target = labels(length, ignore)
        compare(lambda x: F.cross_entropy(x.view(-1, V), target.view(-1), ignore_index=ignore, **options), x, over)
        compare(lambda x: F.cross_entropy(x.mT, target, ignore_index=ignore, **options), x, over)
        compare(lambda x: F.cross_entropy(x.flatten(0, 1), probabilities, **options), x, over)
    shifted = lambda x: F.cross_entropy(x[:, :-1].reshape(-1, V), labels(length)[:, 1:].reshape(-1))  # noqa: E731
    compare(shifted, x, over)
    padded = F.pad(labels(length), (0, 1), value=-100)[:, 1:]
    compare(lambda x: nn.CrossEntropyLoss()(x.flatten(0, 1), padded.flatten()), x, over)
    compare(lambda x: F.nll_loss(x.log_softmax(-1).mT, labels(length), weight), x, over)
    compare(lambda x: F.nll_loss(x.view(-1, V).log_softmax(-1), labels(length).view(-1), reduction="sum"), x, over)
    valid = labels(length) != -100
    compare(lambda x: F.cross_entropy(x[valid], labels(length)[valid]), x, over)
    each = lambda x: F.cross_entropy(x.mT, labels(length), reduction="none")  # noqa: E731
    compare(lambda x: (each(x) * valid).sum() / valid.sum(), x, over)
    compare(lambda x: F.cross_entropy(x.mT, x.argmax(-1).detach()), x, over)
    compare(lambda x: F.cross_entropy(x[:, 0], labels(length)[:, 0]), x, over)
    compare(lambda x: F.cross_entropy(x[0, 0], labels(length)[0, 0]), x, over)
    compare(lambda x: F.cross_entropy(x.flatten(0, 1), (2 * x).flatten(0, 1).softmax(-1)), x, over)
    compare(lambda x: cross_entropy(x.flatten(0, 1), labels(length).flatten(), z_loss=0.3), x, over)
    halves = {"rtol": 1e-2, "atol": 1e-2}
    compare(lambda x: F.cross_entropy(x.mT, labels(length)), x.bfloat16(), over, **halves)
    with torch.autocast("cpu", torch.bfloat16):
        compare(lambda x: F.cross_entropy(x.mT, labels(length)), x.bfloat16(), over, **halves)


@pytest.mark.parametrize(("size", "balance", "length"), LAYOUTS)
def test_every_option_gives_torchs_loss_and_gradient(ranks: RankPool, size: int, balance: Balance, length: int) -> None:
    ranks(size, every_option, length, balance)


def one_small_sum(rank: int) -> None:
    length = 9
    over, target = sequence(length), labels(length)
    target[:, 5:] = -100
    local = over.part(numbers(B, length, V), 1).requires_grad_()
    traffic = over.axis.traffic
    loss = F.cross_entropy(
        SequenceShard.wrap(local, dim=1, sequence=over)[:, :-1].reshape(-1, V), target[:, 1:].reshape(-1)
    )
    loss.backward()
    assert traffic.calls == {"all_reduce": 1, "all_gather": 0, "reduce_scatter": 0}
    assert traffic.bytes["all_reduce"] == 8
    traffic.reset()
    valid = target != -100
    each = F.cross_entropy(SequenceShard.wrap(local, dim=1, sequence=over).mT, target, reduction="none")
    ((each * valid).sum() / valid.sum()).backward()
    assert traffic.calls == {"all_reduce": 1, "all_gather": 0, "reduce_scatter": 0}


def test_a_cross_entropy_costs_one_sum_of_one_number(ranks: RankPool) -> None:
    ranks(4, one_small_sum)


def nothing_valid(rank: int) -> list[Any]:
    """A rank without a valid label, a batch without one."""
    over = sequence(8, "contiguous")
    target = torch.full((1, 8), -100)
    target[0, 0] = 3
    local = over.part(numbers(1, 8, V), 1).requires_grad_()
    loss = F.cross_entropy(SequenceShard.wrap(local, dim=1, sequence=over).flatten(0, 1), target.flatten())
    loss.backward()
    none = torch.full((8,), -100)
    flat = SequenceShard.wrap(local, dim=1, sequence=over).flatten(0, 1)
    return [
        float(loss),
        float(local.grad.abs().sum()),
        float(F.cross_entropy(flat, none)),
        float(F.cross_entropy(flat, none, reduction="sum")),
    ]


def test_ranks_without_a_valid_label_add_nothing(ranks: RankPool) -> None:
    (first, own, mean, total), (second, other, _, _) = ranks(2, nothing_valid)
    assert first == second == pytest.approx(float(F.cross_entropy(numbers(1, 8, V)[:, 0], torch.tensor([3]))))
    assert own > 0
    assert other == 0
    assert math.isnan(mean)
    assert total == 0


def means_of_means(rank: int) -> tuple[float, float]:
    """Token losses [4] and [1, 1, 1], the rest ignored; each rank has one of the two."""
    over = sequence(6, "contiguous")
    wanted = torch.tensor([4.0, 0, 0, 1, 1, 1], dtype=torch.float64)
    valid = torch.tensor([True, False, False, True, True, True])
    # Logits (0, z) whose loss for class 0 is log(1 + exp(z)).
    whole = torch.stack([torch.zeros(6, dtype=torch.float64), (wanted.exp() - 1).clamp(min=1e-9).log()], -1)[None]
    target = torch.zeros(1, 6, dtype=torch.int64).masked_fill(~valid, -100)
    local = over.part(whole, 1).requires_grad_()
    loss = F.cross_entropy(SequenceShard.wrap(local, dim=1, sequence=over).mT, target)
    loss.backward()
    leaf = whole.clone().requires_grad_()
    F.cross_entropy(leaf.mT, target).backward()
    # Data parallelism takes the mean over the ranks of what each has of a weight's gradient: here of a factor of all logits.
    mean = over.axis.sum((local.grad * local.detach()).sum()[None]) / over.cut.size
    return float(loss), float(mean / (leaf.grad * leaf.detach()).sum())


def test_parts_with_few_tokens_do_not_weigh_more_and_gradients_average_to_the_whole(ranks: RankPool) -> None:
    for loss, ratio in ranks(2, means_of_means):
        assert loss == pytest.approx(1.75)
        assert ratio == pytest.approx(1.0)


def refused(rank: int) -> list[tuple[str, str]]:
    whole = numbers(B, 8, V)
    over = sequence(8)
    shown = SequenceShard.wrap(over.part(whole, 1), dim=1, sequence=over)
    target = torch.arange(B * 8) % V
    found = []
    for wrong, options in [
        (target + 1, {}),
        (target[:3], {}),
        (target.int(), {}),
        (target, {"weight": torch.ones(4, dtype=whole.dtype)}),
        (target, {"reduction": "average"}),
    ]:
        with pytest.raises(Exception) as wanted:
            F.cross_entropy(whole.view(-1, V), wrong, **options)
        with pytest.raises(type(wanted.value)) as got:
            F.cross_entropy(shown.view(-1, V), wrong, **options)
        found.append((str(wanted.value), str(got.value)))
    return found


def test_what_torch_refuses_is_refused_on_all_ranks(ranks: RankPool) -> None:
    for found in ranks(2, refused):
        assert found[0] == ("Target 7 is out of bounds.", "Target 7 is out of bounds.")
        assert found[1][0] == found[1][1]


def inside_a_door(rank: int, length: int) -> None:
    over = sequence(length)
    whole, target = numbers(B, length, V), labels(length)
    for options in ({}, {"label_smoothing": 0.1}, {"reduction": "sum"}):
        leaf = whole.clone().requires_grad_()
        wanted = F.cross_entropy(leaf.view(-1, V), target.view(-1), **options)
        wanted.backward()
        for flat in (True, False):
            local = over.part(whole, 1, float("nan")).requires_grad_()
            logits, given = (local.flatten(0, 1), target.flatten()) if flat else (local.mT, target)
            loss = local_cross_entropy(logits, given, over, B, **options)
            loss.backward()
            assert type(loss) is Tensor
            torch.testing.assert_close(loss, wanted)
            torch.testing.assert_close(local.grad, over.part(leaf.grad, 1) * over.cut.size)
    local = over.part(whole, 1, float("nan"))
    each = local_cross_entropy(local.flatten(0, 1), target.flatten(), over, B, reduction="none")
    wanted = F.cross_entropy(whole.mT, target, reduction="none")
    torch.testing.assert_close(each.view(B, -1), over.part(wanted, 1))
    with pytest.raises(ValueError, match=r"not those of 2 rows of \d tokens each|not those of 2 rows"):
        local_cross_entropy(local.flatten(0, 1), target.flatten()[:-2], over, B)


def test_a_loss_inside_a_door_is_that_of_whole_sequences(ranks: RankPool) -> None:
    ranks(2, inside_a_door, 9)


def cut_twice(rank: int) -> None:
    """cp 2 x tp 2: logits whose tokens and whose columns are cut."""
    cp = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    over, axis = sequence(9, group=cp), CollectiveAxis(tp)
    whole, target, each = numbers(B, 9, V), labels(9), numbers(B, 9, V, seed=4)
    weight, mask, one = numbers(V, seed=3).abs(), each[..., 0] > 0, target.clamp(min=0)[..., None]
    silent = {
        "cross_entropy": lambda x: F.cross_entropy(x.view(-1, V), target.view(-1)),
        "shifted": lambda x: F.cross_entropy(x[:, :-1].reshape(-1, V), target[:, 1:].reshape(-1)),
        "options": lambda x: F.cross_entropy(x.mT, target, weight, label_smoothing=0.1, reduction="sum"),
        "masked": lambda x: F.cross_entropy(x[mask], one[mask][:, 0]),
        "each": lambda x: (F.cross_entropy(x.mT, target, reduction="none") * mask).sum() / mask.sum(),
        "probabilities": lambda x: F.cross_entropy(x.mT, each.mT.softmax(1)),
        "nll_loss": lambda x: F.nll_loss(x.log_softmax(-1).mT, target),
        "z loss": lambda x: cross_entropy(x.view(-1, V), target.view(-1), z_loss=0.1),
        "argmax": lambda x: (x.argmax(-1) == target).sum(),
        "softmax": lambda x: x.softmax(-1),
        "log_softmax and gather": lambda x: x.log_softmax(-1).gather(-1, one).squeeze(-1).sum(),
        "logsumexp": lambda x: x.logsumexp(-1).square().mean(),
        "topk": lambda x: x.topk(3),
        "max": lambda x: x.max(-1),
        "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean(),
        "scaled": lambda x: 3 * torch.tanh(x / 3) + weight,
        "whole operand": lambda x: x * each,
        "sums": lambda x: (x.sum(), x.mean(1), x.mean((0, 1)), x.norm(), x.amax()),
        "last token": lambda x: x[:, -1],
    }  # fmt: skip
    for name, expression in silent.items():
        leaf = whole.clone().requires_grad_()
        local = columns(over.part(whole, 1, float("nan")), axis).requires_grad_()
        inner = VocabularyShard.wrap(local, vocabulary=V, axis=axis)
        shown = SequenceShard.wrap(inner, dim=1, sequence=over)
        assert shown.shape == whole.shape
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wanted, got = expression(leaf), expression(shown)
        assert not [str(one.message) for one in caught if "made whole" in str(one.message)], name
        first_wanted, first_got = (x[0] if isinstance(x, tuple) else x for x in (wanted, got))
        value = first_got.detach()
        if isinstance(value, SequenceShard):
            value = value.whole()
        if isinstance(value, VocabularyShard):
            value = value.whole()
        torch.testing.assert_close(value, first_wanted.detach())
        if first_wanted.requires_grad:
            factor = numbers(*first_wanted.shape, seed=6)
            (gradient,) = torch.autograd.grad((first_wanted * factor).sum(), leaf)
            (own,) = torch.autograd.grad((first_got * factor).sum(), local)
            expected = columns(over.part(gradient, 1) * 2, axis).nan_to_num(nan=0.0)
            torch.testing.assert_close(own, expected, msg=lambda text: f"{name}: {text}")


def test_logits_whose_tokens_and_columns_are_cut(ranks: RankPool) -> None:
    ranks(4, cut_twice)


def never_gathered(rank: int) -> tuple[dict[str, int], dict[str, int]]:
    cp = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    over, axis = sequence(64, group=cp), CollectiveAxis(tp)
    local = torch.randn(1, 32, 500, requires_grad=True)
    shown = SequenceShard.wrap(VocabularyShard.wrap(local, vocabulary=1000, axis=axis), dim=1, sequence=over)
    F.cross_entropy(shown[:, :-1].flatten(0, 1), torch.zeros(63, dtype=torch.int64)).backward()
    return dict(over.axis.traffic.bytes), dict(axis.traffic.bytes)


def test_neither_tokens_nor_columns_are_gathered_for_a_loss(ranks: RankPool) -> None:
    for sequence_bytes, vocabulary_bytes in ranks(4, never_gathered):
        assert sequence_bytes == {"all_reduce": 4, "all_gather": 0, "reduce_scatter": 0}
        assert sum(vocabulary_bytes.values()) <= 3 * 4 * 2 * 32

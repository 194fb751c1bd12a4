import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_5d.context_parallel.cut import Balance
from tests.context_parallel.shown.parity import compare, numbers, sequence
from tests.ranks import RankPool

B, V = 2, 5
Expression = Callable[[Tensor], Any]
LAYOUTS: list[tuple[int, Balance, int]] = [
    (2, "zigzag", 11),
    (2, "contiguous", 8),
    (4, "zigzag", 9),
    (4, "contiguous", 13),
]


def drawn(*shape: int, high: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def stay_apart(S: int) -> dict[str, Expression]:
    mask = drawn(B, S, high=2, seed=4).bool()
    per_token, per_class, each = numbers(B, S, 1, seed=2), numbers(V, seed=3), numbers(B, S, V, seed=4)
    few, one = drawn(B, S, 3, high=V), drawn(B, S, 1, high=V)
    return {
        "view": lambda x: x.view(-1, V),
        "flat": lambda x: x.flatten(),
        "flat behind": lambda x: x.flatten(1),
        "there and back": lambda x: x.reshape(B * S, V).view(B, S, V),
        "classes second": lambda x: x.transpose(1, 2),
        "classes second, flat": lambda x: x.mT.reshape(B * V, S),
        "permute": lambda x: x.permute(1, 2, 0),
        "unsqueeze": lambda x: x[:, None].unsqueeze(-1),
        "squeeze": lambda x: x[:1].squeeze(0),
        "shifted": lambda x: x[:, :-1],
        "shifted to the other side": lambda x: x[:, 1:],
        "shifted and flat": lambda x: x[..., :-1, :].contiguous().view(-1, V),
        "window": lambda x: x[:, 2:5],
        "window of a window": lambda x: x[:, 1:][:, :-2][:, -3:],
        "windows": lambda x: x.chunk(3, 1),
        "split": lambda x: x.split([2, S - 2], 1),
        "joined windows": lambda x: torch.cat([x[:, :2] * 2, x[:, 2:4], x[:, 4:]], 1),
        "one of the windows": lambda x: x.split(3, 1)[1] * 2,
        "one row": lambda x: x[1],
        "rows by number": lambda x: x[torch.tensor([1, 0, 1])],
        "masked": lambda x: x[mask],
        "masked, classes": lambda x: x[mask][:, 1],
        "masked flat": lambda x: x.view(-1, V)[mask.view(-1)],
        "masked elements": lambda x: x[each > 0],
        "masked_select": lambda x: x[..., 0].masked_select(mask),
        "masked by itself": lambda x: x[x[..., 0] > 0],
        "masked positions": lambda x: x[:, mask[0]],
        "masked and weighted": lambda x: x[mask] * per_token[mask] + x[mask],
        "classes by number": lambda x: x[..., torch.tensor([3, 0])],
        "one class": lambda x: x[..., 1],
        "unbind classes": lambda x: x.unbind(-1),
        "cat of classes": lambda x: torch.cat([x, 2 * x, each], -1),
        "cat of rows": lambda x: torch.cat([x, each], 0),
        "stack": lambda x: torch.stack([x, 2 * x], 1),
        "expand": lambda x: x[:1].expand(3, -1, -1),
        "scaled": lambda x: x / 3 + 1 - x * 2,
        "per token": lambda x: x * per_token,
        "per class": lambda x: x + per_class,
        "whole operand": lambda x: x * each,
        "whole operand, flat": lambda x: x.view(-1, V) * each.view(-1, V),
        "shifted against whole": lambda x: x[:, :-1] - each[:, 1:],
        "masked_fill": lambda x: x.masked_fill(mask[..., None], -1.0),
        "where": lambda x: torch.where(each > 0, x, 0.5),
        "in place": lambda x: x.div_(2).add_(per_token).tanh_(),
        "assigned": lambda x: _assigned(x, mask),
        "assigned token": lambda x: _assigned(x, (slice(None), 1)),
        "assigned class": lambda x: _assigned(x, (..., 2)),
        "float": lambda x: x.float(),
        "clone": lambda x: x.contiguous().cpu().clone().detach(),
        "compared": lambda x: (x > 0, x.isnan(), x == each),
        "softmax": lambda x: x.softmax(-1),
        "log_softmax": lambda x: x.mT.log_softmax(1),
        "argmax": lambda x: x.argmax(-1),
        "topk": lambda x: x.topk(2),
        "sort": lambda x: x.sort(-1),
        "max": lambda x: x.max(-1),
        "logsumexp": lambda x: x.logsumexp(-1),
        "sum of classes": lambda x: (x.sum(-1), x.mean(-1, keepdim=True), x.std(-1), x.norm(dim=-1)),
        "sum of rows": lambda x: x.mean(0),
        "gather": lambda x: x.gather(-1, few),
        "probability of targets": lambda x: x.log_softmax(-1).gather(-1, one).squeeze(-1),
        "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
        "cross_entropy, none": lambda x: F.cross_entropy(x.mT, one[..., 0], reduction="none"),
        "mse_loss, none": lambda x: F.mse_loss(x, each, reduction="none"),
        "matrix product": lambda x: x @ numbers(V, 3, seed=8),
        "matrix product of batches": lambda x: x @ numbers(B, V, 3, seed=8),
        "linear": lambda x: F.linear(x, numbers(3, V, seed=8), numbers(3, seed=9)),
        "pad classes": lambda x: F.pad(x, (0, 2)),
    }  # fmt: skip


def become_plain(S: int) -> dict[str, Expression]:
    mask = drawn(B, S, high=2, seed=4).bool()
    each, flags = numbers(B, S, V, seed=4), (numbers(B, S, V, seed=5) > 0).double()
    weight = numbers(V, seed=3).abs()
    last = torch.tensor([S - 1, 2])
    return {
        "sum": lambda x: (x.sum(), x.sum(1), x.sum((0, 1)), x.sum(1, keepdim=True), x.view(-1, V).sum(0), x[:, 1:].sum()),
        "mean": lambda x: (x.mean(), x.mean(1), x.mean((0, 1)), x.flatten(0, 1).mean(0), x.mT.mean(-1)),
        "masked mean": lambda x: (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True),
        "weighted mean": lambda x: (x.logsumexp(-1) * mask).sum() / mask.sum(),
        "mean of masked": lambda x: x[mask].mean(0),
        "no token": lambda x: x[mask & False].sum(),
        "amax": lambda x: (x.amax(1), x.amin((0, 1)), x.max(), x.min()),
        "any": lambda x: ((x > 3).any(1), (x > 30).any(), (x > -4).all(), x.isfinite().all()),
        "count": lambda x: ((x > 0).sum(), (x > 0).sum(1), torch.count_nonzero(x > 0)),
        "norm": lambda x: (x.norm(), x.norm(dim=1), x.norm(p=1), x.norm(p=float("inf"))),
        "logsumexp": lambda x: (x.logsumexp(1), x.logsumexp((0, 1))),
        "first token": lambda x: (x[:, 0], x[:, -1], x[0, 3], x.select(1, S - 2), x[1, 2, 3]),
        "token of a window": lambda x: x[:, 1:][:, 1, 2:],
        "token of flat ones": lambda x: x.view(-1, V)[S + 1],
        "last tokens": lambda x: x[torch.arange(B), last],
        "tokens by number": lambda x: (x[:, torch.tensor([3, 3, 0])], x[:, [1, 2], 0]),
        "mse_loss": lambda x: (F.mse_loss(x, each), F.mse_loss(x[:, :-1], each[:, 1:], reduction="sum")),
        "l1_loss": lambda x: (F.l1_loss(x, each), F.smooth_l1_loss(x, each), F.huber_loss(x, each)),
        "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), flags),
        "with logits": lambda x: F.binary_cross_entropy_with_logits(x, flags, pos_weight=weight),
        "kl_div": lambda x: (F.kl_div(x.log_softmax(-1), each.softmax(-1), reduction="batchmean"), F.kl_div(x.log_softmax(-1), each.softmax(-1))),
        "gaussian": lambda x: F.gaussian_nll_loss(x, each, torch.ones_like(each)),
        "products of tokens": lambda x: x.view(-1, V).T @ (2 * x).view(-1, V),
        "products with whole": lambda x: x.mT @ each,
        "equal": lambda x: (torch.equal(x, x), torch.allclose(x, x + 1e-12)),
        "penalty": lambda x: x.logsumexp(-1).square().mean() + 0.1 * x.softmax(-1).mean((0, 1)).square().sum(),
    }  # fmt: skip


def made_whole(S: int) -> dict[str, Expression]:
    each = numbers(B, S, V, seed=4)
    return {
        "cumsum": lambda x: x.cumsum(1),
        "every other": lambda x: x[:, ::2],
        "std": lambda x: x.std(),
        "two windows": lambda x: x[:, 1:] * x[:, :-1],
        "roll": lambda x: x.roll(1, 1),
        "flip": lambda x: x.flip(1),
        "attention": lambda x: x @ x.mT,
        "max of tokens": lambda x: x.max(1).values,
        "softmax of tokens": lambda x: x.softmax(1),
        "classes are tokens": lambda x: F.cross_entropy(x, drawn(B, V, high=S)),
        "piece of flat ones": lambda x: x.view(-1, V)[:-1],
        "prefix": lambda x: torch.cat([each[:, :1], x], 1),
        "iteration over tokens": lambda x: list(x.transpose(0, 1)),
        "view of halves": lambda x: x[:, :4].reshape(B, 2, 2, V),
        "numpy": lambda x: x.detach().numpy().sum(),
    }  # fmt: skip


def _assigned(x: Tensor, index: Any) -> Tensor:
    x = x.clone()
    x[index] = -2.0
    return x


def run(rank: int, table: str, length: int, balance: Balance) -> dict[str, tuple[list[str], list[str]]]:
    """For each expression the kinds of its results, and what was said."""
    found = {}
    for name, expression in globals()[table](length).items():
        over = sequence(length, balance)
        loose = 1e-6 if name == "float" else 1e-9
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                got = compare(expression, numbers(B, length, V), over, rtol=loose, atol=loose)
            except Exception as error:
                error.add_note(f"in {table}: {name}")
                raise
        said = [str(one.message) for one in caught if "made whole" in str(one.message)]
        found[name] = [type(one).__name__ for one in got], said
    return found


@pytest.mark.parametrize(("size", "balance", "length"), LAYOUTS)
def test_what_keeps_the_tokens_stays_apart(ranks: RankPool, size: int, balance: Balance, length: int) -> None:
    for found in ranks(size, run, "stay_apart", length, balance):
        for name, (kinds, told) in found.items():
            assert set(kinds) == {"SequenceShard"}, name
            assert not told, (name, told)


@pytest.mark.parametrize(("size", "balance", "length"), LAYOUTS)
def test_what_goes_over_tokens_is_plain_and_gathers_nothing(
    ranks: RankPool, size: int, balance: Balance, length: int
) -> None:
    for found in ranks(size, run, "become_plain", length, balance):
        for name, (kinds, told) in found.items():
            assert "SequenceShard" not in kinds, name
            assert not told, (name, told)


@pytest.mark.parametrize(("size", "balance", "length"), LAYOUTS[1:3])
def test_anything_else_is_made_whole_and_said_once(ranks: RankPool, size: int, balance: Balance, length: int) -> None:
    for found in ranks(size, run, "made_whole", length, balance):
        for name, (kinds, told) in found.items():
            assert "SequenceShard" not in kinds, name
            assert told, name

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_5d.tensor_parallel.vocabulary import VocabularyShard
from tests.ranks import RankPool
from tests.tensor_parallel.vocabulary.parity import axis, compare, logits

B, T, V = 2, 5, 13
ROWS = torch.tensor([[True, False, True, True, False], [False, False, True, True, True]])
ONE = torch.randint(V, (B, T, 1), generator=torch.Generator().manual_seed(0))
FEW = torch.randint(V, (B, T, 3), generator=torch.Generator().manual_seed(1))
LEADING, BROAD, EVERY = logits(B, T, 1, seed=2), logits(V, seed=3), logits(B, T, V, seed=4)

Expression = Callable[[Tensor], Any]

STAY_IN_COLUMNS: dict[str, Expression] = {
    "view": lambda x: x.view(-1, V),
    "reshape": lambda x: x.reshape(B * T, V),
    "flatten": lambda x: x.flatten(0, 1),
    "unflatten": lambda x: x.flatten(0, 1).unflatten(0, (B, T)),
    "shifted": lambda x: x[..., :-1, :],
    "shifted and flat": lambda x: x[..., :-1, :].contiguous().view(-1, V),
    "last token": lambda x: x[:, -1],
    "one row": lambda x: x[1],
    "masked rows": lambda x: x[ROWS],
    "rows by number": lambda x: x[torch.tensor([1, 0, 1]), torch.tensor([4, 4, 0])],
    "rows by number, vocabulary first": lambda x: x.permute(2, 0, 1)[:, torch.tensor([1, 0])],
    "unsqueeze": lambda x: x.unsqueeze(0).unsqueeze(-2),
    "squeeze": lambda x: x[:1].squeeze(),
    "squeeze one": lambda x: x[:1].squeeze(0),
    "transpose of leading": lambda x: x.transpose(0, 1),
    "vocabulary second": lambda x: x.transpose(1, 2),
    "permute": lambda x: x.permute(1, 2, 0),
    "mT": lambda x: x.mT,
    "chunk": lambda x: x.chunk(3, 1),
    "split": lambda x: x.split([2, 3], 1),
    "unbind": lambda x: x.unbind(1),
    "iteration": lambda x: list(x),
    "cat": lambda x: torch.cat([x, 2 * x], 1),
    "cat with whole": lambda x: torch.cat([x, EVERY], 0),
    "stack": lambda x: torch.stack([x, 2 * x], 1),
    "expand": lambda x: x[:1].expand(3, -1, -1),
    "scaled": lambda x: x / 3 + 1 - x * 2,
    "softcap": lambda x: 3 * torch.tanh(x / 3),
    "clamp": lambda x: x.clamp(-1, 1),
    "temperature per token": lambda x: x / LEADING.abs(),
    "bias": lambda x: x + BROAD,
    "whole operand": lambda x: x * EVERY,
    "whole operand, vocabulary second": lambda x: x.mT * EVERY.mT,
    "masked_fill by token": lambda x: x.masked_fill(ROWS[..., None], -1.0),
    "masked_fill by column": lambda x: x.masked_fill(BROAD > 0, -1.0),
    "where": lambda x: torch.where(EVERY > 0, x, 0.5),
    "in place": lambda x: x.div_(2).add_(BROAD).tanh_(),
    "augmented": lambda x: x.__imul__(2).__iadd__(BROAD),
    "assigned column": lambda x: _assigned(x, (..., 3)),
    "assigned columns": lambda x: _assigned(x, (slice(None), slice(None), torch.tensor([0, 12]))),
    "assigned rows": lambda x: _assigned(x, ROWS),
    "assigned last token": lambda x: _assigned(x, (slice(None), -1)),
    "part in place": lambda x: _changed(x, lambda y: y[:, 1:3]),
    "part in place, another shape": lambda x: _changed(x, lambda y: y.transpose(0, 1).flatten(0, 0)[2]),
    "float": lambda x: x.float(),
    "half": lambda x: x.half(),
    "to": lambda x: x.to(torch.bfloat16),
    "double of float": lambda x: x.float().double(),
    "contiguous, cpu, clone": lambda x: x.contiguous().cpu().clone(),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "logsigmoid": lambda x: F.logsigmoid(x),
    "softplus": lambda x: F.softplus(x),
    "gelu": lambda x: F.gelu(x),
    "compared": lambda x: (x > 0, x.isnan(), x == x),
    "softmax": lambda x: x.softmax(-1),
    "softmax of tokens": lambda x: x.softmax(1),
    "log_softmax": lambda x: F.log_softmax(x, dim=-1),
    "log_softmax, vocabulary second": lambda x: F.log_softmax(x.mT, dim=1),
    "softmax in float": lambda x: F.softmax(x.half(), -1, dtype=torch.float32),
    "sum over rows": lambda x: x.sum(0),
    "max over tokens": lambda x: x.amax(1),
    "cumsum over tokens": lambda x: x.cumsum(1),
    "zeros_like": lambda x: torch.zeros_like(x) + torch.ones_like(x) + torch.full_like(x, 2.0),
}  # fmt: skip

LOSE_THE_VOCABULARY: dict[str, Expression] = {
    "argmax": lambda x: x.argmax(-1),
    "argmax, vocabulary second": lambda x: x.mT.argmax(dim=1, keepdim=True),
    "argmin": lambda x: x.argmin(-1),
    "argmax of ties": lambda x: torch.zeros_like(x).argmax(-1),
    "max": lambda x: x.max(-1),
    "min": lambda x: torch.min(x, dim=2, keepdim=True),
    "amax": lambda x: x.amax(-1),
    "amin of all": lambda x: x.amin(),
    "max of all": lambda x: x.max(),
    "topk": lambda x: x.topk(5),
    "topk of nearly all": lambda x: torch.topk(x, V - 1, dim=-1),
    "topk, smallest, vocabulary second": lambda x: x.mT.topk(2, dim=1, largest=False),
    "logsumexp": lambda x: x.logsumexp(-1),
    "logsumexp, keepdim": lambda x: x.mT.logsumexp(1, keepdim=True),
    "sum": lambda x: x.sum(-1),
    "sum of all": lambda x: x.sum(),
    "mean": lambda x: x.mean(-1),
    "mean of all": lambda x: x.mean(),
    "norm": lambda x: (x.norm(), x.norm(dim=-1), x.norm(p=1), x.norm(p=float("inf"))),
    "mean over tokens": lambda x: x.mean((0, 1)),
    "largest of each column": lambda x: x.flatten(0, 1).amax(0),
    "any": lambda x: ((x > 3).any(-1), (x > 30).any()),
    "all": lambda x: ((x > -4).all(-1), x.isfinite().all()),
    "count": lambda x: (x > 0).sum(-1),
    "gather": lambda x: x.gather(-1, FEW),
    "gather of log_softmax": lambda x: torch.gather(x.log_softmax(-1), 2, ONE)[..., 0],
    "take_along_dim": lambda x: torch.take_along_dim(x, FEW, -1),
    "one column": lambda x: x[..., 11],
    "columns by number": lambda x: x[..., torch.tensor([3, -1])],
    "probability of each target": lambda x: x.flatten(0, 1).softmax(1)[torch.arange(B * T), ONE.flatten()],
    "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "nll_loss": lambda x: F.nll_loss(x.mT.log_softmax(1), ONE[..., 0], BROAD.abs(), ignore_index=4),
    "nll_loss, sum": lambda x: F.nll_loss(x.flatten(0, 1).log_softmax(1), ONE.flatten(), reduction="sum"),
    "kl_div": lambda x: F.kl_div(x.log_softmax(-1), EVERY.softmax(-1), reduction="batchmean"),
    "kl_div of logs": lambda x: F.kl_div(x.log_softmax(-1), (2 * x).log_softmax(-1), reduction="sum", log_target=True),
    "equal": lambda x: (torch.equal(x, x), torch.equal(x, x + 1)),
    "allclose": lambda x: torch.allclose(x, x + 1e-12),
}  # fmt: skip

MADE_WHOLE: dict[str, Expression] = {
    "sort": lambda x: x.sort(-1, descending=True),
    "cumsum": lambda x: x.softmax(-1).cumsum(-1),
    "slice of columns": lambda x: x[..., 2:9],
    "vocabulary joined": lambda x: torch.cat([x, x], -1),
    "flat": lambda x: x.flatten(),
    "matrix product": lambda x: x @ EVERY[0].mT,
    "std": lambda x: x.std(-1),
    "prod": lambda x: x.prod(-1),
    "whole": lambda x: x.whole() if isinstance(x, VocabularyShard) else x,
    "list": lambda x: x.detach().tolist(),
    "numpy": lambda x: x.detach().numpy().sum(),
}  # fmt: skip


def _assigned(x: Tensor, index: Any) -> Tensor:
    x = x.clone()
    x[index] = -2.0
    return x


def _changed(x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
    x = x.clone()
    part(x).mul_(3)
    return x


def all_expressions(rank: int, table: str) -> dict[str, tuple[list[str], list[str]]]:
    """For each expression the kinds of its results, and what was said."""
    over = axis()
    found = {}
    for name, expression in globals()[table].items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                got = compare(expression, logits(B, T, V), over, **_tolerance(name))
            except Exception as error:
                error.add_note(f"in {table}: {name}")
                raise
        said = [str(one.message) for one in caught if "made whole" in str(one.message)]
        found[name] = [type(one).__name__ for one in got], said
    return found


def _tolerance(name: str) -> dict[str, float]:
    loose = {"half": 1e-3, "to": 1e-2, "float": 1e-6, "double of float": 1e-6, "softmax in float": 1e-3}
    return dict.fromkeys(("rtol", "atol"), loose.get(name, 1e-9))


@pytest.mark.parametrize("size", [2, 4])
def test_what_keeps_the_vocabulary_stays_in_columns(ranks: RankPool, size: int) -> None:
    for found in ranks(size, all_expressions, "STAY_IN_COLUMNS"):
        for name, (kinds, told) in found.items():
            assert set(kinds) == {"VocabularyShard"}, name
            assert not told, name


@pytest.mark.parametrize("size", [2, 4])
def test_what_loses_the_vocabulary_is_plain_and_gathers_nothing(ranks: RankPool, size: int) -> None:
    for found in ranks(size, all_expressions, "LOSE_THE_VOCABULARY"):
        for name, (kinds, told) in found.items():
            assert "VocabularyShard" not in kinds, name
            assert not told, name


@pytest.mark.parametrize("size", [2, 4])
def test_anything_else_is_made_whole_and_said_once(ranks: RankPool, size: int) -> None:
    for found in ranks(size, all_expressions, "MADE_WHOLE"):
        for name, (kinds, told) in found.items():
            assert "VocabularyShard" not in kinds, name
            assert len(told) == (name != "whole"), (name, told)

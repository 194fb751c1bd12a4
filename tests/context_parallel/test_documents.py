"""Packed documents in models that write their masks down, or know nothing of them: numbers of one process with a mask of all pairs."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_5d import ContextParallel, FiveD, PipelineParallel, TensorParallel
from lightning_5d.context_parallel.cut import Balance
from lightning_5d.context_parallel.documents import StepDocuments
from lightning_5d.context_parallel.lengths import BatchLengths
from lightning_5d.models import DecoderConfig, LanguageModel
from tests.context_parallel.by_gathering import HandMadeDoor, Mirrored, difference_from_one_process
from tests.context_parallel.test_training import METHODS
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, SIZES, Dealt, Rows, apart, fit
from tests.trainers import quiet

ROWS, WIDTH, HEADS = 2, 16, 4
INFINITE = float("-inf")


class Masked(nn.Module):
    """Attention over (B, S, D) with a mask made of documents, positions and what is no padding, two layers that share it."""

    def __init__(self, mask: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.mask = mask

    def forward(self, x: Tensor, ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        mask = self.mask(ids, positions, keep)
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        return x


def _same(d: Tensor) -> Tensor:
    return (d[:, :, None] == d[:, None, :])[:, None]


def _triangle(d: Tensor) -> Tensor:
    return torch.tril(torch.ones(d.shape[1], d.shape[1], dtype=torch.bool))


MASKS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "documents": lambda d, p, k: _same(d),
    "unsqueezed": lambda d, p, k: torch.eq(d.unsqueeze(-1), d.unsqueeze(-2)).unsqueeze(1),
    "of heads": lambda d, p, k: d[:, None, :, None] == d[:, None, None, :],
    "expanded": lambda d, p, k: _same(d).expand(-1, HEADS, -1, -1),
    "with a triangle": lambda d, p, k: _same(d) & _triangle(d),
    "a triangle first": lambda d, p, k: _triangle(d)[None, None] & _same(d),
    "times": lambda d, p, k: (_same(d).float() * torch.tril(torch.ones(d.shape[1], d.shape[1]))).bool(),
    "logical": lambda d, p, k: torch.logical_and(_same(d), (p[:, :, None] >= p[:, None, :])[:, None]),
    "the future": lambda d, p, k: _same(d) & ~(p[:, None, None, :] > p[:, None, :, None]),
    "keys": lambda d, p, k: _same(d) & k[:, None, None, :],
    "triangle and keys": lambda d, p, k: _triangle(d) & k[:, None, None, :],
    "pairs of keys": lambda d, p, k: (k[:, None, :, None] & k[:, None, None, :]) & _same(d),
    "added": lambda d, p, k: torch.where(_same(d) & _triangle(d), 0.0, INFINITE),
    "filled": lambda d, p, k: torch.zeros(d.shape[0], 1, d.shape[1], d.shape[1]).masked_fill(~_same(d), INFINITE),
    "inverted": lambda d, p, k: (1.0 - (_same(d) & _triangle(d)).to(torch.float32)) * torch.finfo(torch.float32).min,
    "hidden": lambda d, p, k: ~((d[:, None, :, None] != d[:, None, None, :]) | ~k[:, None, None, :]),
    "window": lambda d, p, k: _same(d) & ((p[:, :, None] - p[:, None, :] < 3) & (p[:, :, None] >= p[:, None, :]))[:, None],
    "both sides": lambda d, p, k: _same(d) & ((p[:, None, :] - p[:, :, None]).abs() <= 2).unsqueeze(1),
    "outside": lambda d, p, k: _same(d) & ~((p[:, None, :] - p[:, :, None]).abs() > 2).unsqueeze(1),
    "two numberings": lambda d, p, k: _same(d) & _same(d // 2 + 7),
    "written": lambda d, p, k: _and_in_place(_same(d), _triangle(d)),
}  # fmt: skip


def _and_in_place(mask: Tensor, other: Tensor) -> Tensor:
    mask &= other
    return mask


def packed(length: int, restart: bool) -> dict[str, Tensor]:
    """Two rows with other documents in each; positions of the sequence, or within documents."""
    documents = torch.stack([torch.arange(length) * 5 // length, torch.arange(length) * 3 // length + 4])
    positions = torch.arange(length).expand(2, -1).clone()
    if restart:
        for row in range(2):
            starts = [int((documents[row] == each).nonzero()[0]) for each in documents[row]]
            positions[row] -= torch.tensor(starts)
    keep = torch.ones(2, length, dtype=torch.bool)
    keep[0, 2] = keep[1, -3] = False
    return {"ids": documents, "positions": positions, "keep": keep}


def _parity(rank: int, balance: Balance, names: list[str], length: int) -> dict[str, float]:
    door = HandMadeDoor(length, balance)
    x = torch.randn(ROWS, length, WIDTH, generator=torch.Generator().manual_seed(0))
    found = {}
    for name in names:
        for restart in (False, True):
            found[f"{name} {restart}"] = difference_from_one_process(
                door, Masked(MASKS[name]), x=x, **packed(length, restart)
            )
    found["gathers"] = 0.0 if len({id(mask) for mask in door.attention.masks[-2:]}) == 1 else 1.0
    door.close()
    return found


@pytest.mark.parametrize(("balance", "size", "length"), [("zigzag", 2, 13), ("contiguous", 3, 12)])
def test_masks_that_a_model_writes_down(ranks: RankPool, balance: Balance, size: int, length: int) -> None:
    for found in ranks(size, _parity, balance, list(MASKS), length, timeout=60):
        assert {name: value for name, value in found.items() if not value < 1e-5} == {}


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str]] = {
    "own positions": (lambda d, p, k: _same(d) & _grows(_count(d)), "positions in the sequence.*position_ids"),
    "an asymmetrical window": (lambda d, p, k: (p[:, :, None] - p[:, None, :] < 3)[:, None], "compares numbers|at distances from any to 2"),
    "a table": (lambda d, p, k: _same(d) & (torch.rand(6, 6) > 0.5), r"mask \(2, 1, 6, 6\) of pairs of tokens|differs between sequences"),
    "a bias": (lambda d, p, k: torch.where(_same(d), 1.0, INFINITE), "pairs of tokens|differs between sequences"),
    "another order": (lambda d, p, k: _same(d).transpose(-1, -2) | _same(p), "differs between sequences"),
    "writing": (lambda d, p, k: _same(d).masked_fill_(~_same(d), False), r"writes \(masked_fill_\).*& instead"),
}  # fmt: skip


def _count(d: Tensor) -> Tensor:
    return torch.arange(d.shape[1])


def _grows(numbers: Tensor) -> Tensor:
    return numbers[:, None] >= numbers


@pytest.mark.parametrize("name", REFUSED)
def test_what_says_nothing_of_all_tokens_is_refused(name: str) -> None:
    mask, words = REFUSED[name]
    door = HandMadeDoor(12, axis=Mirrored())
    with pytest.raises(MisconfigurationException, match=re.compile(words, re.DOTALL)):
        door(Masked(mask), x=torch.randn(ROWS, 12, WIDTH), **packed(12, False))


def test_what_is_not_followed_is_the_table_of_own_pairs() -> None:
    door = HandMadeDoor(12, axis=Mirrored())
    d = torch.tensor([[0, 0, 1, 1, 1, 2]])
    expected = (d[:, :, None] == d[:, None, :]) & torch.ones(6, 6).tril().bool()
    with door.redirect.inside(door.inside()):
        mask = (d[:, :, None] == d[:, None, :]) & torch.ones(6, 6).tril().bool()
        distance = d[:, :, None] - d[:, None, :]
        for found, wanted in (
            (mask.sum(-1), expected.sum(-1)),
            (mask.float().mul(2) + torch.ones(6, 6), expected.float() * 2 + 1),
            (mask[:, 1:3], expected[:, 1:3]),
            (mask.unsqueeze(-1), expected.unsqueeze(-1)),
            (mask.transpose(-1, -2), expected.transpose(-1, -2)),
            (distance.abs().float().exp(), (d[:, :, None] - d[:, None, :]).abs().float().exp()),
            (-distance + 1, d[:, None, :] - d[:, :, None] + 1),
        ):
            assert type(found) is Tensor
            torch.testing.assert_close(found, wanted.to(found.dtype))


class Numbered(LanguageModel):
    """A decoder that knows nothing of documents."""


class Explicit(LanguageModel):
    """The same in one process, with a mask of all pairs in the place of `is_causal`."""

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Any:
        documents = batch["documents"]
        if documents.ndim == 1:
            rows, length = batch["input_ids"].shape
            lengths = documents.diff()
            documents = torch.arange(len(lengths)).repeat_interleave(lengths).reshape(rows, length)
        seen = (documents[:, :, None] == documents[:, None, :]) & torch.ones(
            documents.shape[1], documents.shape[1]
        ).tril().bool()
        plain = F.scaled_dot_product_attention

        def attend(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
            assert rest.pop("is_causal")
            return plain(q, k, v, attn_mask=seen[:, None], **rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lightning_5d.models.decoder.F.scaled_dot_product_attention", attend)
            return super().training_step(batch, batch_idx)


def model(kind: type[LanguageModel], **changes: Any) -> LanguageModel:
    torch.manual_seed(0)
    return kind(DecoderConfig(**{**SIZES, **changes}), {"lr": 3e-3, "warmup_steps": 2})


class Packed(Rows):
    """Rows with other documents in each; the last token of one has the first of the next as its label, which does not matter here."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        tokens = len(row["labels"])
        return {**row, "documents": (torch.arange(tokens) * (2 + index % 3) // tokens) * 3 + index}


class Cumulative(Dealt):
    """Batches with the cumulative lengths of the documents of all rows."""

    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()
        loader.collate_fn = _cumulative
        return loader


def _cumulative(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    flat = torch.cat([row["documents"] + 100 * place for place, row in enumerate(rows)])
    _, counts = flat.unique_consecutive(return_counts=True)
    starts = F.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    return {**{name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}, "documents": starts}


def data(tokens: int, kind: type[Dealt] = Dealt, rows: int = 8) -> Dealt:
    return kind(Packed(rows, tokens), 4)


def compare(
    ranks: RankPool, *plugins: Any, world: int, deal: Callable[[], Dealt], strategy: Any = None, **changes: Any
) -> None:
    """Trains on some ranks with `documents`, and in one process with a mask of all pairs."""
    made = partial(FiveD, *plugins, **(strategy or {}))
    found = ranks(
        world,
        partial(
            fit,
            module=partial(model, Numbered, **changes),
            data=deal,
            strategy=made,
            devices=world,
            gradient_clip_val=0.5,
            precision="64-true",
        ),
        **SEPARATE,
    )
    expected = fit(0, partial(model, Explicit, **changes), deal, None, gradient_clip_val=0.5, precision="64-true")
    plain = fit(0, partial(model, Numbered, **changes), deal, None, gradient_clip_val=0.5, precision="64-true")
    assert abs(plain["losses"][0] - expected["losses"][0]) > 1e-3  # documents matter
    differences = apart(found, expected, 1e-6)
    assert max(differences.values()) < 1e-9, differences


@pytest.mark.parametrize(("size", "tokens"), [(2, 13), (4, 16)])
@pytest.mark.parametrize("method", ["ring zigzag", "ring contiguous", "ulysses", "all_gather zigzag"])
def test_an_entry_of_the_batch_for_a_model_that_knows_of_no_documents(
    ranks: RankPool, method: str, size: int, tokens: int
) -> None:
    plugin = ContextParallel(size, **METHODS[method], documents="documents")
    compare(ranks, plugin, world=size, deal=partial(data, tokens))


@pytest.mark.parametrize("size", [1, 2])
def test_cumulative_lengths(ranks: RankPool, size: int) -> None:
    compare(ranks, ContextParallel(size, documents="documents"), world=size, deal=partial(data, 9, Cumulative))


def test_one_rank_alone_keeps_to_documents(ranks: RankPool) -> None:
    compare(ranks, ContextParallel(1, documents="documents"), world=1, deal=partial(data, 9))


def test_cut_layers_and_sequences(ranks: RankPool) -> None:
    plugins = ContextParallel(2, documents="documents"), TensorParallel(2, sequence_parallel=True)
    compare(ranks, *plugins, world=4, deal=partial(data, 13))


def test_stages_and_blocks_that_are_computed_again(ranks: RankPool) -> None:
    plugins = ContextParallel(2, documents="documents"), PipelineParallel(2, microbatches=2)
    compare(ranks, *plugins, world=4, deal=partial(data, 9), strategy={"activation_checkpointing": "full"})


def ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long)


WRONG: dict[str, tuple[Mapping[str, Tensor], str]] = {
    "missing": ({}, r"no tensor 'documents', but input_ids \(2, 8\)"),
    "floats": ({"documents": torch.zeros(2, 8)}, r"shape \(2, 8\) and dtype torch.float32.*integers"),
    "another length": ({"documents": ids(2, 12)}, r"\(2, 12\) beside input_ids with 8 tokens"),
    "other rows": ({"documents": ids(3, 8)}, r"\(3, 8\).*called with \(2, 8\) tokens"),
    "dimensions": ({"documents": ids(2, 8, 1)}, r"\(2, 8, 1\)\. It has to be"),
    "no beginning": ({"documents": torch.tensor([3, 16])}, "begins with 3"),
    "falling": ({"documents": torch.tensor([0, 9, 5, 16])}, r"falls from 9 to 5 \(entries 1 and 2\)"),
    "another end": (
        {"documents": torch.tensor([0, 8])},
        r"ends with 8, but model is called with \(2, 8\) tokens, 16.*microbatches of a pipeline",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_entries_that_say_nothing_about_documents_are_refused(name: str) -> None:
    entries, words = WRONG[name]
    batch = {"input_ids": ids(2, 8), **entries}
    lengths = BatchLengths({"input_ids": 8}, [])
    with pytest.raises(MisconfigurationException, match=re.compile(words, re.DOTALL)):
        StepDocuments.of("documents", (batch, 0), {}, lengths, True).limits("model", 2, 8)


def test_a_name_has_to_be_one() -> None:
    with pytest.raises(MisconfigurationException, match=r"documents=3.*no name of an entry"):
        quiet(strategy=FiveD(ContextParallel(2, documents=3)), devices=2)  # type: ignore[arg-type]

"""Modules that treat a rank's tokens as if they were all are refused in the first step, and no others."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_5d.context_parallel.first_step import FirstStep
from lightning_5d.models.decoder import Decoder, DecoderConfig
from tests.context_parallel.by_gathering import HandMadeDoor, Mirrored

LENGTH = 32
LOCAL = LENGTH // 2


class Does(nn.Module):
    """Does something with (B, s, D) behind a layer, as modules do."""

    def __init__(self, what: Callable[..., Tensor], width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.layer = nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn(2 * LENGTH, width))
        self.register_buffer("mask", torch.ones(2 * LENGTH, 2 * LENGTH).tril().bool()[None, None])
        self.register_buffer("types", torch.zeros(1, 2 * LENGTH, dtype=torch.long))
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.pointwise = nn.Conv1d(width, width, 1)
        self.mixer = nn.Linear(LOCAL, LOCAL)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.batch_norm = nn.BatchNorm1d(width)
        self.what = what

    def forward(self, ids: Tensor) -> Tensor:
        return self.what(self, self.layer(self.embed(ids)))


def first_step(module: nn.Module, batch: int = 3, length: int = LENGTH, **inputs: Tensor) -> None:
    door = HandMadeDoor(length, axis=Mirrored())
    ids = torch.randint(0, 20, (batch, length))
    with FirstStep(module, door.redirect).watching("train"):
        door(module, **{next(iter(module.forward.__annotations__)): ids}, **inputs)


def heads(x: Tensor, count: int = 4) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def eager(m: Does, x: Tensor) -> Tensor:
    q = heads(x)
    scores = q @ q.transpose(-1, -2) / 2
    return (scores.softmax(-1) @ q).transpose(1, 2).flatten(2)


REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "eager attention": (eager, f"scores of {LOCAL} by {LOCAL} tokens.*matmul.*test_first_step.py.*attn_implementation"),
    "attention by einsum": (lambda m, x: torch.einsum("bqd,bkd->bqk", x, x), f"scores of {LOCAL} by {LOCAL}"),
    "attention by bmm": (lambda m, x: torch.bmm(x, x.mT), f"scores of {LOCAL} by {LOCAL}"),
    "linear attention": (lambda m, x: x @ (x.transpose(1, 2) @ x), "adds up over the tokens.*matmul"),
    "mean": (lambda m, x: x.mean(1), f"mixes tokens.*mean.*{LOCAL} of {LENGTH} tokens.*training_step"),
    "max": (lambda m, x: x.max(dim=-2).values, "mixes tokens.*max"),
    "mean behind views": (lambda m, x: heads(x).flatten(0, 1).mean(1), "mixes tokens.*mean"),
    "mean behind rows": (lambda m, x: x.flatten(0, 1).relu().view(3, LOCAL, -1).mean(1), "mixes tokens.*mean"),
    "softmax": (lambda m, x: x.softmax(1), "mixes tokens.*softmax"),
    "cumsum": (lambda m, x: x.cumsum(1), "mixes tokens.*cumsum"),
    "sort": (lambda m, x: x.sort(1).values, "mixes tokens.*sort"),
    "flip": (lambda m, x: x.flip(1), "mixes tokens.*flip"),
    "roll": (lambda m, x: x.roll(1, 1), "mixes tokens.*roll"),
    "diff": (lambda m, x: x.diff(dim=1), "mixes tokens.*diff"),
    "normalize": (lambda m, x: F.normalize(x, dim=1), "mixes tokens.*normalize"),
    "convolution": (lambda m, x: m.conv(x.transpose(1, 2)), "mixes tokens.*conv1d"),
    "pooling": (lambda m, x: F.avg_pool1d(x.transpose(1, 2), 2), "mixes tokens.*avg_pool1d"),
    "MLP-Mixer": (lambda m, x: m.mixer(x.transpose(1, 2)), "mixes tokens.*linear"),
    "recurrence": (lambda m, x: m.gru(x)[0], "mixes tokens.*gru"),
    "batch norm": (lambda m, x: m.batch_norm(x.transpose(1, 2)), "normalises over the tokens.*LayerNorm"),
    "layer norm over tokens": (lambda m, x: F.layer_norm(x, x.shape[1:]), "mixes tokens.*layer_norm"),
    "shift": (lambda m, x: F.pad(x, (0, 0, 1, 0))[:, :-1], f"adds to the {LOCAL} tokens.*pad"),
    "first token": (lambda m, x: x[:, 0], f"picks some of the {LOCAL} tokens.*__getitem__"),
    "last token": (lambda m, x: x.select(1, -1), "picks some of.*select"),
    "slice": (lambda m, x: x[:, 1:], "picks some of.*__getitem__"),
    "token by index": (lambda m, x: x[torch.arange(3), torch.tensor([1, 2, 3])], "picks some of"),
    "halves": (lambda m, x: x.chunk(2, 1)[0], "picks some of.*chunk"),
    "class token": (lambda m, x: torch.cat([m.table[:1].expand(3, 1, -1), x], 1), f"adds to the {LOCAL} tokens.*cat"),
    "counted positions": (lambda m, x: x + F.embedding(torch.arange(x.shape[1]), m.table), "counts the 16 tokens.*position_ids"),
    "table": (lambda m, x: x + m.table[: x.shape[1]], "counts the 16 tokens.*add"),
    "rotary": (
        lambda m, x: heads(x) * (torch.arange(x.shape[1])[:, None] * torch.ones(1, 3)).cos()[None, None],
        "counts the 16 tokens.*mul",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("width", [12, LOCAL])
def test_what_mixes_a_ranks_tokens_is_refused_by_name_and_line(name: str, width: int) -> None:
    what, message = REFUSED[name]
    if width == LOCAL and name == "rotary":
        pytest.skip("heads of another size")
    with pytest.raises(MisconfigurationException, match=re.compile(message, re.DOTALL)):
        first_step(Does(what, width))


def attention(m: Does, x: Tensor) -> Tensor:
    q = heads(x)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


ALLOWED: dict[str, Callable[..., Tensor]] = {
    "attention": attention,
    "features": lambda m, x: x.softmax(-1) + x.mean(-1, keepdim=True) + F.layer_norm(x, x.shape[-1:]),
    "heads": lambda m, x: heads(x).mean(1) + heads(x).softmax(-1).sum(1),
    "halves of features": lambda m, x: torch.cat([x.chunk(2, -1)[1], x[..., : x.shape[-1] // 2]], -1),
    "parts": lambda m, x: torch.stack(x.split(x.shape[-1] // 2, -1)).sum(0),
    "routing": lambda m, x: x.flatten(0, 1).softmax(-1).topk(2, -1).values.sum(-1),
    "experts": lambda m, x: torch.zeros_like(x.flatten(0, 1)).index_add(0, (i := torch.arange(5)), x.flatten(0, 1)[i]),
    "some tokens": lambda m, x: x[x.sum(-1) > 0],
    "constant table": lambda m, x: x + F.embedding(m.types[:, : x.shape[1]], m.table),
    "count of features": lambda m, x: x * torch.arange(x.shape[-1]),
    "pointwise convolution": lambda m, x: m.pointwise(x.transpose(1, 2)).transpose(1, 2),
    "all of them": lambda m, x: x[:, : x.shape[1]].narrow(1, 0, x.shape[1])[:, -x.shape[1] :],
    "expanded": lambda m, x: x[:, None].expand(-1, 3, -1, -1).sum(1) + x[:, :, None].sum(2),
    "weights": lambda m, x: x @ (m.layer.weight @ m.layer.weight.T),
    "square of features": lambda m, x: x * (x.unsqueeze(-1) @ x.unsqueeze(-2)).mean((-1, -2))[..., None],
}  # fmt: skip


@pytest.mark.parametrize("batch", [3, LOCAL])
@pytest.mark.parametrize("width", [12, LOCAL])
@pytest.mark.parametrize("name", ALLOWED)
def test_what_each_token_does_alone_runs_with_whatever_sizes(name: str, width: int, batch: int) -> None:
    first_step(Does(ALLOWED[name], width), batch)


@pytest.mark.parametrize(("heads", "length"), [(4, 8), (2, 8), (4, 4), (4, 32)])
def test_the_decoder_runs_with_as_many_heads_rows_or_features_as_tokens(heads: int, length: int) -> None:
    model = Decoder(DecoderConfig.preset("tiny", num_heads=heads, vocab_size=20))
    door = HandMadeDoor(length, axis=Mirrored())
    positions = door.sequence.positions(torch.device("cpu"))
    first_step(model, batch=2, length=length, position_ids=positions)
    with pytest.raises(MisconfigurationException, match=r"counts the .* tokens of a rank from 0.*decoder\.py"):
        first_step(model, batch=2, length=length)


class HiddenAttention(nn.Module):
    """Attention by a kernel that nobody sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(F.one_hot(ids % 4).float())


def test_attention_that_nobody_has_seen_is_refused_when_the_step_has_ended() -> None:
    with pytest.raises(MisconfigurationException, match=r"HiddenAttention.*no call of scaled_dot_product_attention"):
        first_step(HiddenAttention())


def test_a_table_for_the_whole_sequence_is_named_as_the_reason() -> None:
    module = Does(lambda m, x: x + m.table[:LENGTH])
    with pytest.raises(MisconfigurationException, match=f"{LOCAL} of {LENGTH} tokens.*RuntimeError.*position_ids"):
        first_step(module)


def test_other_errors_stay_what_they_are() -> None:
    def fails(m: Does, x: Tensor) -> Tensor:
        raise KeyError("tokens 16")

    with pytest.raises(KeyError):
        first_step(Does(fails))


def test_later_steps_of_a_kind_are_not_watched() -> None:
    door = HandMadeDoor(LENGTH, axis=Mirrored())
    module = Does(attention)
    guards = FirstStep(module, door.redirect)
    ids = torch.randint(0, 20, (3, LENGTH))
    with guards.watching("train"):
        door(module, ids=ids)
        assert door.redirect.watch is not None
    module.what = lambda m, x: x.mean(1)
    with guards.watching("train"):
        assert door.redirect.watch is None
        door(module, ids=ids)
    with pytest.raises(MisconfigurationException, match="mixes tokens"), guards.watching("validate"):
        door(module, ids=ids)
    assert door.redirect.watch is None

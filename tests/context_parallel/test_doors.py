"""Steps through doors are those of one process, whatever goes in and comes out; what cannot be is refused by name."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_5d.context_parallel.shown import is_shown
from lightning_5d.models.decoder import DecoderConfig
from lightning_5d.models.language_model import LanguageModel
from tests.context_parallel.inside_doors import compare, doors_of, tokens
from tests.modules import TinyLM
from tests.ranks import RankPool

WIDTH = 8


class Attention(nn.Module):
    """One head; the length is nowhere assumed."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        attended = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)
        return x + self.out(attended[:, 0])


class Layers(L.LightningModule):
    """Layers and absolute positions in the LightningModule itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(13, WIDTH), nn.Embedding(16, WIDTH)
        self.table = nn.Parameter(torch.randn(16, WIDTH))
        self.blocks = nn.ModuleList([Attention(), Attention()])
        self.heads = nn.ModuleDict({"token": nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 13))})
        self.score = nn.Linear(WIDTH, 1)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["input_ids"]
        at = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(at) + self.table[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.heads["token"](x)
        # A head on one token's vector, and one on all of them.
        pooled = self.score(x[:, 0]) + self.score(x).mean(1)
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) + pooled.square().mean()


def _batch(length: int, rows: int = 2) -> dict[str, Tensor]:
    labels = tokens(rows, length, seed=2)
    labels[0, length // 2 :] = -100  # valid tokens are uneven over ranks
    return {"input_ids": tokens(rows, length), "labels": labels}


def _step(module: Any, batch: Any) -> Tensor:
    loss: Tensor = module.loss(batch)
    return loss


def _native(rank: int) -> None:
    config = DecoderConfig(
        vocab_size=13,
        hidden_size=16,
        intermediate_size=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        context_length=16,
    )
    torch.manual_seed(0)
    model = LanguageModel(config)
    for length in (8, 7, 5):
        compare(copy.deepcopy(model), _step, _batch(length))
    compare(copy.deepcopy(model), _step, _batch(7), contiguous=True)
    for restarts in (torch.arange(8)[None] + 100, torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]])):
        compare(copy.deepcopy(model), _step, _batch(8) | {"position_ids": restarts})


def test_the_native_decoder_equals_one_process_also_where_lengths_do_not_divide_and_positions_are_given(
    ranks: RankPool,
) -> None:
    ranks(2, _native, backend="gloo", timeout=60)


def _layers(rank: int) -> None:
    compare(Layers(), _step, _batch(8))
    compare(Layers(), _step, _batch(7, rows=7))  # as many rows as tokens
    compare(TinyLM(), _step, tokens(2, 9))  # the step cuts its batch into inputs and targets itself: 8 of 9 tokens
    compare(TinyLM(), _step, tokens(2, 8))  # 7 of 8


def test_layers_in_the_lightning_module_are_doors_each_and_positions_there_are_global(ranks: RankPool) -> None:
    ranks(2, _layers, backend="gloo", timeout=60)


class Pieces(L.LightningModule):
    """Calls a head on pieces of what a door has shown."""

    def __init__(self, what: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.what = nn.Embedding(13, WIDTH), nn.Linear(WIDTH, 13), what
        self.mix = Attention()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x, labels = self.embed(batch["input_ids"]), batch["labels"]
        n = labels.shape[1]
        if self.what == "window":
            logits, labels = self.head(self.mix(x[:, :-1])).flatten(0, 1), labels[:, 1:].flatten()
        elif self.what == "flat":
            logits, labels = self.head(x.flatten(0, 1)), labels.flatten()
        elif self.what == "chosen":
            chosen = labels != -100
            logits, labels = self.head(x[chosen]), labels[chosen]
        else:
            logits, labels = self.head(x[:, n - 2 :]).flatten(0, 1), labels[:, n - 2 :].flatten()
        assert logits.shape == (*labels.shape, 13)
        return F.cross_entropy(logits, labels)


def _pieces(rank: int) -> None:
    for what in ("window", "flat", "chosen", "few"):
        for length in (8, 7):
            compare(Pieces(what), _step, _batch(length))


def test_pieces_of_shown_sequences_go_through_doors_again(ranks: RankPool) -> None:
    ranks(2, _pieces, backend="gloo", timeout=60)


def _held(rank: int) -> tuple[list[tuple[int, ...]], list[bool]]:
    module, batch = Layers(), _batch(8)
    seen: list[tuple[int, ...]] = []
    module.blocks[1].qkv.register_forward_hook(lambda m, args, out: seen.append(tuple(args[0].shape)))
    doors = doors_of(module)
    with doors.step((batch, 0), {}):
        x = module.tokens(batch["input_ids"])
        for block in module.blocks:
            x = block(x)
        logits = module.heads["token"](x)
        flat = module.heads["token"](x.flatten(0, 1))
    doors.close()
    return seen, [is_shown(x), is_shown(logits), is_shown(flat)]


def test_each_rank_computes_its_tokens_alone_and_holds_no_others(ranks: RankPool) -> None:
    assert ranks(2, _held, backend="gloo", timeout=60) == [([(2, 4, WIDTH)], [True] * 3)] * 2


@dataclass
class Out:
    hidden: Tensor
    extra: dict[str, Any]


class Wide(nn.Module):
    """Takes and returns everything in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(13, WIDTH), Attention()
        self.by = nn.Linear(5, WIDTH)

    def forward(self, ids: Tensor, about: dict[str, Any], table: Tensor, *, scale: Tensor | None = None) -> Any:
        x = self.embed(ids) + self.by(about["speaker"])[:, None] + table
        x = x * about["weights"][0][..., None] + (0 if scale is None else scale)
        x = self.attention(x)
        flat = x.flatten(0, 1)
        return Out(x, {"flat": flat, "each": (x.mean(-1), [ids]), "none": None, "name": "wide"})


class Nested(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.speaker = Wide(), nn.Linear(5, 5)
        self.table = nn.Parameter(torch.randn(16, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def loss(self, batch: Any) -> Tensor:
        ids, more = batch
        n = ids.shape[1]
        about = {"speaker": self.speaker(more["speaker"]), "weights": (more["weights"],)}
        out = self.net(ids, about, self.table[:n], scale=self.scale)
        assert out.hidden.shape == (*ids.shape, WIDTH)
        assert out.extra["flat"].shape == (ids.numel(), WIDTH)
        each, again = out.extra["each"]
        assert each.shape == ids.shape
        assert torch.equal(torch.as_tensor(again[0]), ids)
        assert out.extra["none"] is None
        assert out.extra["name"] == "wide"
        target = torch.linspace(0, 1, ids.numel())
        return out.hidden.square().mean() + (out.extra["flat"].sum(-1) * target).sum() + (each * more["weights"]).sum()


def _nested(rank: int, length: int) -> None:
    generator = torch.Generator().manual_seed(3)
    more = {
        "speaker": torch.randn(2, 5, generator=generator),
        "weights": torch.rand(2, length, generator=generator),
    }
    outside = ("scale", "table", "speaker.weight")
    compare(Nested(), _step, (tokens(2, length), more), outside, keys={"weights": 1})


@pytest.mark.parametrize("length", [8, 6])
def test_nested_arguments_and_outputs_are_cut_and_shown_where_they_have_tokens(ranks: RankPool, length: int) -> None:
    ranks(2, _nested, length, backend="gloo", timeout=60)


class _Returns(nn.Module):
    """Returns its hidden states, and something made of all its tokens."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.embed, self.what = nn.Embedding(13, WIDTH), what

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        return x, {"first": x[:, 0], "mean": x.mean(), "wide": x.mean(1)[:, : ids.shape[1]]}[self.what]


class _Pooled(L.LightningModule):
    def __init__(self, what: str, used: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.used = _Returns(what), used

    def loss(self, batch: Tensor) -> Tensor:
        hidden, pooled = self.net(batch)
        return hidden.square().mean() + (pooled.mean() if self.used else 0)


def _apart(rank: int) -> list[str]:
    compare(_Pooled("first", used=False), _step, tokens(2, 8))
    messages = []
    for what, length in (("first", 8), ("mean", 8), ("wide", 16)):
        module = _Pooled(what, used=True)
        doors = doors_of(module)
        with pytest.raises(MisconfigurationException) as caught, doors.step((tokens(2, length), 0), {}):
            module.loss(tokens(2, length))
        messages.append(str(caught.value))
        assert doors.inside is None
        doors.close()
    return messages


def test_what_was_made_of_a_part_of_the_tokens_is_refused_by_name_where_it_is_used(ranks: RankPool) -> None:
    for first, mean, wide in ranks(2, _apart, backend="gloo", timeout=60):
        assert "Output 1 of net (_Returns), of shape (2, 8), was made of 4 of the 8 tokens" in first
        assert "of shape (), was made of 4 of the 8 tokens" in mean
        assert "training_step" in mean
        assert 'keys={"net.1": 1}' in wide.replace("'", '"')  # 8 columns: tokens or features


class _Stop(Exception):
    pass


class _Seeing(nn.Embedding):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, ids: Tensor) -> Tensor:
        self.seen.append(tuple(ids.shape))
        return super().forward(ids)


class _Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Seeing(13, WIDTH)
        self.raises = True

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.inner(ids)
        if self.raises:
            raise _Stop
        return x


class _Calls(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = _Raises()

    def loss(self, batch: Tensor) -> Tensor:
        return self.net(batch).mean()  # type: ignore[no-any-return]


def _exceptions(rank: int) -> None:
    module, ids = _Calls(), tokens(2, 8)
    doors = doors_of(module)
    seen = module.net.inner.seen
    with pytest.raises(_Stop), doors.step((ids, 0), {}):
        module.loss(ids)
    assert doors.inside is None
    module.net.raises = False
    with doors.step((ids, 0), {}):
        assert module.net(ids).shape == (2, 8, WIDTH)
    # Outside of steps, and in copies, modules compute on whole sequences.
    assert module.net(ids).shape == (2, 8, WIDTH)
    twin = copy.deepcopy(module)
    assert pickle.loads(pickle.dumps(module.net))(ids).shape == (2, 8, WIDTH)
    with doors.step((ids, 0), {}):
        twin.net(ids)
        module.net(ids[:, :1])  # a token alone is no sequence of this step
    doors.close()
    module.net(ids)
    assert seen == [(2, 4), (2, 4), (2, 8), (2, 1), (2, 8)]
    assert twin.net.inner.seen[-1] == (2, 8)
    assert "forward" not in vars(module.net)
    assert not module.net._forward_pre_hooks
    assert not module.net.inner._forward_pre_hooks


def test_an_exception_leaves_no_door_open_and_nothing_is_cut_outside_of_steps(ranks: RankPool) -> None:
    ranks(2, _exceptions, backend="gloo", timeout=60)


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)

    def forward(self, ids: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        x: Tensor = self.embed(ids)
        return x


class _WithMask(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = _Masked()


def _refusals(rank: int) -> list[str]:
    module, ids = _WithMask(), tokens(2, 8)
    messages = []
    for mask in (torch.ones(8, 8), torch.ones(2, 1, 8, 8, dtype=torch.bool)):
        doors = doors_of(module)
        with pytest.raises(MisconfigurationException) as caught, doors.step((ids, 0), {}):
            module.net(ids, attn_mask=mask)
        messages.append(str(caught.value))
        doors.close()
    for options, length in (({}, 3), ({"pad": False}, 10), ({"keys": {"ids": 2}}, 8)):
        doors = doors_of(module, **options)
        with pytest.raises(MisconfigurationException) as caught, doors.step((tokens(2, length), 0), {}):
            module.net(tokens(2, length))
        messages.append(str(caught.value))
        doors.close()
    return messages


def test_masks_of_pairs_and_lengths_that_cannot_be_cut_are_refused_with_their_numbers(ranks: RankPool) -> None:
    for square, four, short, padded, dim in ranks(2, _refusals, backend="gloo", timeout=60):
        assert "attn_mask of net has shape (8, 8)" in square
        assert "is_causal=True" in square
        assert "(2, 1, 8, 8)" in four
        assert "has 3 tokens, and 2 ranks need at least 4" in short
        assert 'balance="contiguous"' in short
        assert "10 tokens" in padded
        assert "8 or 12" in padded
        assert "without a dimension 2" in dim

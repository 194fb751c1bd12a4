"""Calls of attention inside a door, of every kind, give what one process gives; what cannot is refused by name."""

import re
import time
import unittest.mock
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from lightning_5d.context_parallel.cut import Balance
from lightning_5d.models.decoder import Decoder, DecoderConfig
from tests.context_parallel.by_gathering import GatheredAttention, HandMadeDoor, Mirrored, difference_from_one_process
from tests.ranks.pool import RankPool

BATCH, WIDTH, HEADS = 2, 16, 4


class Calls(nn.Module):
    """Attention over (B, S, D), as a function of queries, keys and values by heads."""

    def __init__(self, call: Callable[..., Tensor], kv_heads: int = HEADS, value_size: int = WIDTH // HEADS) -> None:
        super().__init__()
        torch.manual_seed(1)
        size = WIDTH // HEADS
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, kv_heads * size)
        self.v = nn.Linear(WIDTH, kv_heads * value_size)
        self.kv_heads, self.call = kv_heads, call
        self.register_buffer("bias", torch.ones(64, 64).tril().bool()[None, None])
        self.register_buffer(
            "causal", torch.zeros(64, 64).masked_fill(torch.ones(64, 64).triu(1).bool(), float("-inf"))
        )
        self.memory = nn.Parameter(torch.randn(BATCH, HEADS, 5, size))

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, heads in ((self.q, HEADS), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        out = self.call(self, q, k, v) if keep is None else self.call(self, q, k, v, keep)
        return out.transpose(1, 2).flatten(2)


sdpa = F.scaled_dot_product_attention


def repeat_kv(x: Tensor, times: int) -> Tensor:
    batch, heads, length, size = x.shape
    return x[:, :, None].expand(batch, heads, times, length, size).reshape(batch, heads * times, length, size)


def without_heads(m: Calls, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = sdpa(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), is_causal=True)
    return out.unflatten(0, (BATCH, HEADS))


def in_five(m: Calls, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.unflatten(1, (2, 2)) for x in (q, k, v))
    return sdpa(q, k, v, is_causal=True).flatten(1, 2)


def made_mask(length: int) -> Tensor:
    return torch.triu(torch.full((length, length), float("-inf")), diagonal=1)


CALLS: dict[str, Callable[[], Calls]] = {
    "full": lambda: Calls(lambda m, q, k, v: sdpa(q, k, v)),
    "causal": lambda: Calls(lambda m, q, k, v: sdpa(q, k, v, is_causal=True)),
    "positional": lambda: Calls(lambda m, q, k, v: sdpa(q, k, v, None, 0.0, True)),
    "scaled": lambda: Calls(lambda m, q, k, v: sdpa(q, k, v, is_causal=True, scale=1.7)),
    "aten": lambda: Calls(lambda m, q, k, v: torch.ops.aten.scaled_dot_product_attention(q, k, v, None, 0.0, True)),
    "grouped": lambda: Calls(lambda m, q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True), kv_heads=2),
    "repeated": lambda: Calls(lambda m, q, k, v: sdpa(q, repeat_kv(k, 2), repeat_kv(v, 2)), kv_heads=2),
    "interleaved": lambda: Calls(
        lambda m, q, k, v: sdpa(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, dim=1), is_causal=True), kv_heads=1
    ),
    "small values": lambda: Calls(lambda m, q, k, v: sdpa(q, k, v), value_size=3),
    "large values": lambda: Calls(lambda m, q, k, v: sdpa(q, k, v, is_causal=True), value_size=6),
    "three dimensions": lambda: Calls(without_heads),
    "five dimensions": lambda: Calls(in_five),
    "slice of a table": lambda: Calls(
        lambda m, q, k, v: sdpa(q, k, v, m.causal[: q.shape[2], : q.shape[2]])
    ),
    "slice of a boolean table": lambda: Calls(
        lambda m, q, k, v: sdpa(q, k, v, m.bias[:, :, : q.shape[2], : q.shape[2]])
    ),
    "filled": lambda: Calls(
        lambda m, q, k, v: sdpa(q, k, v, torch.zeros(q.shape[2], q.shape[2]).masked_fill(torch.ones(q.shape[2], q.shape[2]).triu(1).bool(), float("-inf")))
    ),
    "made triangle": lambda: Calls(lambda m, q, k, v: sdpa(q, k, v, made_mask(q.shape[2]))),
    "made boolean": lambda: Calls(
        lambda m, q, k, v: sdpa(q, k, v, torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()[None, None])
    ),
    "made and compared": lambda: Calls(
        lambda m, q, k, v: sdpa(q, k, v, torch.tril(torch.ones(q.shape[2], q.shape[2])).unsqueeze(0) != 0)
    ),
    "whole keys": lambda: Calls(lambda m, q, k, v: sdpa(q, m.memory, m.memory)),
    "whole keys with a mask": lambda: Calls(
        lambda m, q, k, v: sdpa(q, m.memory, m.memory, torch.tensor([True, True, False, True, True]).view(1, 1, 1, 5))
    ),
}  # fmt: skip


def _parity(rank: int, balance: Balance, names: list[str], length: int) -> dict[str, float]:
    door = HandMadeDoor(length, balance)
    found = {}
    for name in names:
        x = torch.randn(BATCH, length, WIDTH, generator=torch.Generator().manual_seed(0))
        found[name] = difference_from_one_process(door, CALLS[name](), x=x)
        if name in ("repeated", "interleaved", "grouped"):
            found[f"heads of {name}"] = float(door.attention.heads[-1] != (HEADS, 1 if name == "interleaved" else 2))
    door.close()
    return found


@pytest.mark.parametrize(("balance", "size", "length"), [("zigzag", 2, 12), ("contiguous", 2, 11), ("zigzag", 3, 14)])
def test_attention_of_every_form_gives_what_one_process_gives(
    ranks: RankPool, balance: Balance, size: int, length: int
) -> None:
    for found in ranks(size, _parity, balance, list(CALLS), length, timeout=60):
        assert {name: value for name, value in found.items() if value > 1e-5} == {}


class Padded(Calls):
    def __init__(self, kind: str) -> None:
        def call(m: Calls, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
            keys = keep.bool()[:, None, None, :]
            if kind == "added":
                return sdpa(q, k, v, torch.zeros(keys.shape).masked_fill(~keys, torch.finfo(torch.float32).min))
            if kind == "expanded":
                return sdpa(q, k, v, keys.expand(-1, HEADS, q.shape[2], -1))
            return sdpa(q, k, v, keys)

        super().__init__(call)
        self.layers = nn.ModuleList()


class Twice(nn.Module):
    """Torch's own encoder."""

    def __init__(self, causal: bool, norm_first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 24, dropout=0.0, batch_first=not causal, norm_first=norm_first, activation="gelu"
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not causal and not norm_first)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.causal = causal

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if self.causal:
            length = x.shape[1]
            mask = nn.Transformer.generate_square_subsequent_mask(length)
            x = self.encoder(x.transpose(0, 1), mask=mask, is_causal=True).transpose(0, 1)
            hidden = torch.triu(torch.ones(length, length), diagonal=1).bool()
            return self.attention(x, x, x, attn_mask=hidden, need_weights=False)[0]
        x = self.encoder(x, src_key_padding_mask=None if attention_mask is None else attention_mask == 0)
        x, _ = self.attention(x, x, x, key_padding_mask=None if attention_mask is None else attention_mask == 0)
        return x


def _masked(rank: int) -> dict[str, float]:
    found = {}
    for length in (12, 9):
        door = HandMadeDoor(length)
        x = torch.randn(BATCH, length, WIDTH, generator=torch.Generator().manual_seed(0))
        keep = torch.ones(BATCH, length, dtype=torch.long)
        keep[0, 5:], keep[1, :4] = 0, 0
        for kind in ("boolean", "added", "expanded"):
            found[f"{kind} {length}"] = difference_from_one_process(door, Padded(kind), x=x, keep=keep)
        for name, module in {"causal": Twice(True), "encoder": Twice(False), "norm first": Twice(False, True)}.items():
            for training in (True, False):
                module.train(training)
                masks = (None,) if name == "causal" else (None, keep)
                for mask in masks:
                    inputs: dict[str, Any] = {"x": x} if mask is None else {"x": x, "attention_mask": mask}
                    key = f"{name} {length} {training} {mask is None}"
                    found[key] = difference_from_one_process(door, module, **inputs)
                with torch.no_grad():  # where torch has a faster way that calls no attention
                    calls = door.redirect.calls
                    door(module, x=x)
                    found[f"{name} {training} calls"] = float(door.redirect.calls - calls != 3)
        door.close()
    return found


def test_keys_that_are_padding_and_torchs_own_layers(ranks: RankPool) -> None:
    for found in ranks(2, _masked, timeout=60):
        assert {name: value for name, value in found.items() if value > 1e-5} == {}


def refuse(call: Callable[..., Tensor], match: str, **kwargs: Any) -> None:
    door = HandMadeDoor(12, axis=Mirrored())
    with pytest.raises(MisconfigurationException, match=re.compile(match, re.DOTALL)):
        door(Calls(call, **kwargs), x=torch.randn(BATCH, 12, WIDTH))


def window(length: int) -> Tensor:
    return torch.ones(length, length).tril().triu(-8) > 0


REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "dropout": (lambda m, q, k, v: sdpa(q, k, v, dropout_p=0.1), r"Calls drops 0\.1 .*dropout_p=0\.1.*6 of 12 tokens.*attention_dropout=0"),
    "window": (lambda m, q, k, v: sdpa(q, k, v, window(6)), r"mask \(6, 6\) of pairs of tokens.*is_causal=True"),
    "bias": (lambda m, q, k, v: sdpa(q, k, v, torch.randn(6, 6)), "mask .* of pairs of tokens"),
    "bias of keys": (lambda m, q, k, v: sdpa(q, k, v, torch.randn(1, 1, 1, 6)), "adds other numbers than 0 and -inf"),
    "bias of heads": (lambda m, q, k, v: sdpa(q, k, v, torch.zeros(1, HEADS, 6, 6)), "for each of its heads"),
    "learned": (lambda m, q, k, v: sdpa(q, k, v, nn.Parameter(torch.zeros(6, 6))), "learned bias"),
    "of rows": (lambda m, q, k, v: sdpa(q, k, v, torch.ones(BATCH, 1, 6, 6).bool()), "differs between sequences"),
    "changed": (lambda m, q, k, v: sdpa(q, k, v, torch.ones(6, 6).bool().tril().logical_not_().logical_not_()), "of pairs"),
    "of another length": (lambda m, q, k, v: sdpa(q, k, v, torch.ones(1, 7).bool()), "for 6 keys"),
    "causal to whole keys": (lambda m, q, k, v: sdpa(q, m.memory, m.memory, is_causal=True), "causal attention of its tokens to 5 keys"),
    "pairs with whole keys": (lambda m, q, k, v: sdpa(q, m.memory, m.memory, torch.ones(6, 5).bool()), "one row for all queries"),
    "other queries": (lambda m, q, k, v: sdpa(m.memory, k, v), "5 queries for 6 keys"),
    "kernel": (lambda m, q, k, v: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0], "calls the kernel"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_with_numbers(name: str) -> None:
    refuse(*REFUSED[name])


def test_attention_among_what_is_no_sequence_is_left_alone() -> None:
    def call(m: Calls, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inner = sdpa(m.memory, m.memory, m.memory, dropout_p=0.0, is_causal=True)
        return sdpa(q, inner, inner)

    door = HandMadeDoor(12, axis=Mirrored())
    door(Calls(call), x=torch.randn(BATCH, 12, WIDTH))
    assert door.redirect.calls == 0


def test_weights_that_nobody_has_are_told_so_when_used() -> None:
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out, weights = self.attention(x, x, x)
            return out + weights.sum()

    door = HandMadeDoor(12, axis=Mirrored())
    with pytest.raises(NotImplementedError, match="need_weights"):
        door(Uses(), x=torch.randn(BATCH, 12, WIDTH))


def test_autocast_casts_queries_keys_and_values_as_it_does_for_torchs_attention() -> None:
    door = HandMadeDoor(12, axis=Mirrored())
    module = Calls(lambda m, q, k, v: sdpa(q.float() * 1.0, k, v))
    with torch.autocast("cpu", torch.bfloat16):
        out = door(module, x=torch.randn(BATCH, 12, WIDTH))
    assert out.dtype == torch.bfloat16
    assert door.attention.dtypes == [torch.bfloat16]
    with pytest.raises(ValueError, match="one dtype"):
        door(Calls(lambda m, q, k, v: sdpa(q.double(), k, v)), x=torch.randn(BATCH, 12, WIDTH))


def test_nothing_is_redirected_at_user_level_or_after_an_error() -> None:
    door = HandMadeDoor(12, axis=Mirrored())
    module = Calls(lambda m, q, k, v: sdpa(q, k, v, is_causal=True))
    x = torch.randn(BATCH, 6, WIDTH)
    with door.redirect.inside(door.inside()):
        with door.redirect.outside():
            expected = module(x)
        assert door.redirect.calls == 0
        module(x)
        assert door.redirect.calls == 1
    with pytest.raises(ZeroDivisionError), door.redirect.inside(door.inside()):
        1 / 0  # noqa: B018
    assert torch.equal(module(x), expected)
    assert door.redirect.calls == 1


def test_compiled_blocks_break_at_attention_and_at_dropout_only() -> None:
    torch.manual_seed(0)
    model = Calls(lambda m, q, k, v: m.dropout(sdpa(q, repeat_kv(k, 2), repeat_kv(v, 2), is_causal=True)), kv_heads=2)
    model.dropout = nn.Dropout(0.5)
    x = torch.randn(BATCH, 12, WIDTH)
    outputs = []
    for compiled in (False, True):
        counter = CompileCounter()
        if compiled:
            model.compile(backend=counter)
        for training, rank in ((False, 0), (True, 0), (True, 1)):
            door = HandMadeDoor(12, axis=Mirrored(rank))
            torch.manual_seed(3)
            with torch.no_grad():
                outputs.append(door(model.train(training), x=x))
            assert door.redirect.calls == 1
        if compiled:
            assert counter.frame_count <= 12
    for eager, compiled_output in zip(outputs[:3], outputs[3:], strict=True):
        torch.testing.assert_close(compiled_output, eager)
    assert not torch.equal(outputs[4], outputs[5])


@pytest.mark.alone
def test_what_is_no_attention_costs_little_inside_a_door() -> None:
    model = Decoder(DecoderConfig.preset("small"))
    ids = torch.randint(0, 4096, (1, 64))
    door = HandMadeDoor(128, axis=Mirrored())

    class Nothing(GatheredAttention):
        def __call__(self, q: Tensor, *_: Any) -> Tensor:
            return q

    door.redirect._attention = Nothing(door.axis)

    def plain() -> None:
        with torch.no_grad():
            model(ids)

    def inside() -> None:
        with door.redirect.inside(door.inside()):
            plain()

    def seconds(run: Callable[[], None]) -> float:
        before = time.thread_time()  # others may run meanwhile
        run()
        return time.thread_time() - before

    # Without attention on both sides, in turns: what is left is what passing through costs.
    nothing = unittest.mock.patch("lightning_5d.models.decoder.F.scaled_dot_product_attention", lambda q, *_, **__: q)
    alone = redirected = 1e9
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(40):
        with nothing:
            alone = min(alone, seconds(plain))
        redirected = min(redirected, seconds(inside))
    torch.set_num_threads(threads)
    print(f"{alone * 1e3:.2f} ms alone, {redirected * 1e3:.2f} ms inside")
    assert redirected < 1.5 * alone  # 1.2 on idle cores, up to 1.37 where others share the caches

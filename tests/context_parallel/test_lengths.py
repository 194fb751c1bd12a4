"""How long a step's sequences are is read off its batch, and what is cut of a call off its arguments."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_5d.context_parallel.arguments import Entering, Signature, cut_dimension, plain_entering
from lightning_5d.context_parallel.cut import SequenceCut
from lightning_5d.context_parallel.lengths import BatchLengths, Keys, batch_lengths, check_length


@dataclass
class Batch:
    frames: Tensor
    speaker: Tensor


Pair = namedtuple("Pair", ["text", "answer"])


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long)


def floats(*shape: int) -> Tensor:
    return torch.zeros(shape)


FOUND: list[tuple[str, Any, dict[str, int | None], dict[str, int]]] = [
    ("ids", {"labels": ints(2, 9), "input_ids": ints(2, 8)}, {}, {"input_ids": 8}),
    ("embeddings", {"inputs_embeds": floats(2, 8, 4)}, {}, {"inputs_embeds": 8}),
    ("a tensor", ints(2, 8), {}, {"the batch": 8}),
    ("a pair", (ints(2, 8), ints(2, 7)), {}, {"0": 8}),
    ("integers before floats", (floats(2, 5, 3), ints(2, 8)), {}, {"1": 8}),
    ("floats", (floats(2), floats(2, 5, 3)), {}, {"1": 5}),
    ("labels last", {"labels": ints(2, 9), "x": floats(2, 5, 3)}, {}, {"x": 5}),
    ("nested", {"chosen": {"input_ids": ints(2, 8)}, "rejected": {"input_ids": ints(2, 6)}}, {}, {"chosen.input_ids": 8, "rejected.input_ids": 6}),
    ("a dataclass", Batch(floats(2, 4, 8), floats(2, 3)), {"frames": 2}, {"frames": 8}),
    ("a named tuple", Pair(floats(2, 8), ints(2, 3)), {"0": 1}, {"0": 8}),
    ("a path", {"a": {"x": floats(2, 8)}, "b": {"x": floats(2, 5)}}, {"a.x": 1, "b.x": None}, {"a.x": 8}),
    ("the end", {"x": floats(2, 4, 8)}, {"x": -1}, {"x": 8}),
]  # fmt: skip


@pytest.mark.parametrize(("batch", "keys", "expected"), [case[1:] for case in FOUND], ids=[case[0] for case in FOUND])
def test_the_length_is_found(batch: Any, keys: dict[str, int | None], expected: dict[str, int]) -> None:
    assert batch_lengths((batch, 0), {}, Keys(keys)).by_name == expected


def test_a_batch_without_a_sequence_is_refused_with_its_shapes_and_what_to_say() -> None:
    with pytest.raises(MisconfigurationException) as caught:
        batch_lengths(({"image": floats(2, 3, 32, 32), "y": ints(2)}, 0), {}, Keys())
    assert "image (2, 3, 32, 32)" in str(caught.value)
    assert 'ContextParallel(keys={"image": 1})' in str(caught.value)
    with pytest.raises(MisconfigurationException, match="no tensors"):
        batch_lengths((["text"], 0), {}, Keys())


@pytest.mark.parametrize(
    ("cut", "pad", "numbers", "fix"),
    [
        (SequenceCut(3, 2), True, "x has 3 tokens, and 2 ranks need at least 4", 'balance="contiguous"'),
        (SequenceCut(1, 2, "contiguous"), True, "need at least 2", "Pad to 2"),
        (SequenceCut(6, 4), True, "need at least 8", "use 3 ranks"),
        (SequenceCut(3, 4, "contiguous", 4), True, "need at least 4", "use 3 ranks"),
        (SequenceCut(7, 2), False, "multiple of 4", "4 or 8 tokens"),
    ],
)
def test_lengths_that_cannot_be_cut_are_refused_with_both_numbers(
    cut: SequenceCut, pad: bool, numbers: str, fix: str
) -> None:
    with pytest.raises(MisconfigurationException) as caught:
        check_length(cut, "x", pad=pad)
    assert numbers in str(caught.value)
    assert fix in str(caught.value)


@pytest.mark.parametrize("cut", [SequenceCut(4, 2), SequenceCut(7, 2), SequenceCut(2, 2, "contiguous")])
def test_lengths_that_can_be_cut_pass(cut: SequenceCut) -> None:
    check_length(cut, "x", pad=True)


LENGTHS = BatchLengths({"input_ids": 8}, ())


def entering(**named: Any) -> Entering | None:
    return plain_entering("net", named, LENGTHS, Keys({"memory": 0, "speaker": None}), lambda length: length >= 4)


def test_the_tensor_with_the_sequence_tells_how_a_call_is_cut() -> None:
    assert entering(x=ints(2, 8)) == Entering(8, 2, 1)
    assert entering(x=ints(2, 7)) == Entering(7, 2, 1)  # all but the last token
    assert entering(x=ints(2, 6)) is None
    assert entering(x=floats(2, 8)) is None  # features, for all that is known
    assert entering(x=floats(2, 8, 3), y=ints(2, 7)) == Entering(7, 2, 1)
    assert entering(memory=floats(30, 2, 3)) == Entering(30, 2, 0)
    assert entering(speaker=ints(2, 8)) is None
    assert entering(labels=ints(2, 8)) is None


HOW = Entering(8, 2, 1)
CUT: list[tuple[str, Tensor, int | None]] = [
    ("x", ints(2, 8), 1),
    ("x", floats(2, 8, 4), 1),
    ("x", floats(2, 8), None),
    ("attention_mask", floats(2, 8), 1),
    ("labels", ints(2, 8), None),
    ("next_targets", ints(2, 8), None),
    ("positions", ints(8), 0),
    ("positions", floats(1, 8), 1),
    ("scale", floats(8), None),
    ("freqs", floats(8, 4), 0),
    ("cos", floats(1, 8, 4), 1),
    ("cos", floats(1, 1, 8, 4), 2),
    ("mask", torch.ones(2, 1, 1, 8, dtype=torch.bool), 3),
    ("memory", floats(2, 5, 4), None),
    ("speaker", floats(2, 4), None),
]


@pytest.mark.parametrize(("name", "tensor", "expected"), CUT)
def test_arguments_are_cut_where_they_have_tokens(name: str, tensor: Tensor, expected: int | None) -> None:
    assert cut_dimension("net", (name,), tensor, HOW, LENGTHS, Keys()) == expected


def test_what_a_person_says_about_an_argument_counts() -> None:
    say = Keys({"frames": 2, "net.x": None})
    assert cut_dimension("net", ("frames",), floats(2, 4, 8), HOW, LENGTHS, say) == 2
    assert cut_dimension("net", ("x",), ints(2, 8), HOW, LENGTHS, say) is None
    assert cut_dimension("head", ("x",), ints(2, 8), HOW, LENGTHS, say) == 1
    with pytest.raises(MisconfigurationException, match=r"9 entries along dimension 2.*8 tokens"):
        cut_dimension("net", ("frames",), floats(2, 4, 9), HOW, LENGTHS, say)


def test_as_many_rows_as_tokens_do_not_confuse_tables_with_rows() -> None:
    how = Entering(8, 8, 1)
    assert cut_dimension("net", ("x",), ints(8, 8), how, LENGTHS, Keys()) == 1
    assert cut_dimension("net", ("attention_mask",), ints(8, 8), how, LENGTHS, Keys()) == 1
    assert cut_dimension("net", ("speaker",), ints(8), how, LENGTHS, Keys()) is None
    assert cut_dimension("net", ("position_ids",), ints(8), how, LENGTHS, Keys()) == 0
    assert cut_dimension("net", ("features",), floats(8, 5), how, LENGTHS, Keys()) is None
    with pytest.raises(MisconfigurationException, match="which token sees which"):
        cut_dimension("net", ("src_mask",), floats(8, 8), how, LENGTHS, Keys())


def test_arguments_are_known_by_name_however_they_are_given() -> None:
    class Net(nn.Module):
        def forward(self, a: Tensor, b: Tensor | None = None, *rest: Tensor, c: int = 0, **more: Any) -> None:
            pass

    signature = Signature.of(Net())
    assert signature.all_names == {"a", "b", "c"}
    assert signature.named((1, 2, 3), {"c": 4, "d": 5}) == {"a": 1, "b": 2, "2": 3, "c": 4, "d": 5}
    assert signature.replaced((1, 2, 3), {"c": 4}, {"b": 7, "2": 8, "c": 9}) == ((1, 7, 8), {"c": 9})
    assert signature.replaced((1,), {}, {"b": 7}) == ((1,), {"b": 7})

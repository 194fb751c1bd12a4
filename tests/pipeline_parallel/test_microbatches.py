"""A batch in microbatches is the batch, and what their steps return is what one step over the batch does."""

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lightning_5d.pipeline_parallel.microbatches import Microbatch, batch_rows, merge_outputs, split_batch

IDS = torch.arange(18).reshape(6, 3)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Sample:
    ids: Tensor
    name: str = "train"
    more: dict[str, Tensor] = field(default_factory=dict)


class Encoding(UserDict[str, Tensor]):
    """Like a tokenizer's: a mapping that is no dict."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Duck:
    """Behaves like a mapping and is none by class."""

    def __init__(self, **values: Tensor) -> None:
        self.inside = values

    def __copy__(self) -> "Duck":
        return Duck(**self.inside)

    def keys(self) -> Any:
        return self.inside.keys()

    def values(self) -> Any:
        return self.inside.values()

    def __getitem__(self, key: str) -> Tensor:
        return self.inside[key]

    def __setitem__(self, key: str, value: Tensor) -> None:
        self.inside[key] = value


def sizes(parts: list[Microbatch]) -> list[int]:
    return [part.rows for part in parts]


@pytest.mark.parametrize(
    ("rows", "count", "expected"),
    [(6, 4, [2, 2, 1, 1]), (8, 4, [2, 2, 2, 2]), (3, 8, [1, 1, 1]), (7, 1, [7]), (1, 5, [1]), (9, 2, [5, 4])],
)
def test_sizes_differ_by_one_row_at_most_and_no_microbatch_is_empty(rows: int, count: int, expected: list[int]) -> None:
    whole = torch.randn(rows, 2)
    parts = split_batch(whole, count)
    assert sizes(parts) == expected == [len(part.batch) for part in parts]
    assert torch.equal(torch.cat([part.batch for part in parts]), whole)


def test_tensors_are_views_of_the_batch() -> None:
    for part in split_batch((IDS,), 3):
        assert part.batch[0].untyped_storage().data_ptr() == IDS.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "batch",
    [
        Pair(IDS, IDS + 1),
        Encoding(x=IDS, y=IDS + 1),
        OrderedDict(x=IDS, y=IDS + 1),
        defaultdict(list, x=IDS, y=IDS + 1),
        Duck(x=IDS, y=IDS + 1),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_containers_keep_their_type_and_stay_as_they_were(batch: Any) -> None:
    parts = split_batch(batch, 4)
    assert sizes(parts) == [2, 2, 1, 1]
    read = (lambda b: b.y) if isinstance(batch, Pair) else (lambda b: b["y"])
    assert all(type(part.batch) is type(batch) for part in parts)
    assert torch.equal(read(parts[2].batch), IDS[4:5] + 1)
    assert len(read(batch)) == 6
    back = merge_outputs([part.batch for part in parts], sizes(parts))
    assert type(back) is type(batch)
    assert torch.equal(read(back), IDS + 1)


def test_a_frozen_dataclass_with_nested_values_is_split() -> None:
    parts = split_batch([Sample(IDS, more={"mask": IDS > 4}), {"deep": (IDS.float(), None)}], 2)
    first, deep = parts[1].batch
    assert first.name == "train"
    assert torch.equal(first.ids, IDS[3:])
    assert torch.equal(first.more["mask"], IDS[3:] > 4)
    assert torch.equal(deep["deep"][0], IDS[3:].float())
    assert deep["deep"][1] is None


def test_a_tokenizers_batch_and_a_models_output_keep_their_type() -> None:
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": IDS, "attention_mask": IDS > 2})
    parts = split_batch(encoding, 3)
    assert type(parts[0].batch) is transformers.BatchEncoding
    assert torch.equal(parts[1].batch.attention_mask, IDS[2:4] > 2)
    assert encoding.input_ids is IDS
    kind = transformers.modeling_outputs.CausalLMOutput
    outputs = [kind(loss=torch.tensor(float(i)), logits=part.batch.input_ids.float()) for i, part in enumerate(parts)]
    whole = merge_outputs(outputs, sizes(parts), training=True)
    assert type(whole) is kind
    assert whole.loss == whole["loss"] == 1.0
    assert torch.equal(whole.logits, IDS.float())
    assert outputs[0].loss == 0


def test_masks_and_positions_of_rows_travel_with_their_rows() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 1, 1]])
    positions = mask.cumsum(1)
    for index, part in enumerate(split_batch({"ids": IDS[:4], "mask": mask[:, None, None], "positions": positions}, 4)):
        assert torch.equal(part.batch["mask"].flatten(), mask[index])
        assert torch.equal(part.batch["positions"][0], positions[index])


def test_what_has_other_rows_or_none_goes_whole_to_every_microbatch() -> None:
    weights, row, scalar, marker = torch.rand(13), torch.arange(3)[None], torch.tensor(2.0), object()
    batch = {"row": row, "ids": IDS, "weights": weights, "scalar": scalar, "text": "abcdef", "marker": marker, "n": 6}
    for part in split_batch(batch, 3):
        assert part.batch["row"] is row
        assert part.batch["weights"] is weights
        assert part.batch["scalar"] is scalar
        assert part.batch["marker"] is marker
        assert part.batch["text"] == "abcdef"
        assert part.batch["n"] == 6
        assert len(part.batch["ids"]) == part.rows == 2


def test_lists_with_an_item_per_row_are_split() -> None:
    targets = [{"boxes": torch.zeros(i + 7, 4)} for i in range(6)]
    parts = split_batch((IDS, list("abcdef"), tuple(range(6)), targets, np.arange(6)), 4)
    _, names, numbers, boxes, array = parts[1].batch
    assert names == ["c", "d"]
    assert numbers == (2, 3)
    assert array.tolist() == [2, 3]
    assert [len(box["boxes"]) for box in boxes] == [9, 10]


def test_fields_of_a_pair_are_not_taken_for_its_two_rows() -> None:
    x, y = split_batch([IDS[:2], IDS[:2] + 1], 2)[1].batch
    assert torch.equal(x, IDS[1:2])
    assert torch.equal(y, IDS[1:2] + 1)


def test_images_of_different_sizes_beside_their_targets_are_rows() -> None:
    images = tuple(torch.zeros(3, 4 + i, 5) for i in range(4))
    targets = tuple({"boxes": torch.zeros(i, 4)} for i in range(4))
    parts = split_batch((images, targets), 2)
    assert sizes(parts) == [2, 2]
    assert parts[1].batch[0][0].shape == (3, 6, 5)
    assert len(parts[1].batch[1][1]["boxes"]) == 3


def test_a_batch_of_text_alone_is_split() -> None:
    assert [part.batch for part in split_batch({"text": ["a", "b", "c"]}, 2)] == [{"text": ["a", "b"]}, {"text": ["c"]}]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.zeros(0, 3), r"empty: a tensor of shape \(0, 3\)"),
        ([], "empty"),
        ({"a": 1, "b": torch.tensor(3.0)}, "needs a tensor, or a list"),
        (None, "needs a tensor"),
        ({"x": IDS, "packed": pack_sequence([IDS[0], IDS[1]])}, r"batch\['packed'\] is a PackedSequence"),
        ((IDS, IDS.to_sparse()), r"batch\[1\] is a tensor of layout"),
    ],
)
def test_what_cannot_be_split_is_named(batch: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        split_batch(batch, 2)


def test_no_microbatches_are_refused() -> None:
    with pytest.raises(ValueError, match="into 0 microbatches"):
        split_batch(IDS, 0)


def test_a_users_own_way_wins() -> None:
    parts = split_batch(IDS.T, 3, lambda batch, count: [Microbatch(part, 2) for part in batch.split(2, dim=1)])
    assert sizes(parts) == [2, 2, 2]
    assert torch.equal(parts[1].batch, IDS.T[:, 2:4])
    assert sizes(split_batch(IDS, 2, lambda batch, count: batch.split(5))) == [5, 1]
    with pytest.raises(MisconfigurationException, match="returned 6 microbatches where 2 were asked for"):
        split_batch(IDS, 2, lambda batch, count: batch.split(1))


def test_rows_are_those_of_lightnings_batch_size() -> None:
    from lightning.pytorch.utilities.data import extract_batch_size

    for batch in (IDS, [IDS, torch.rand(13)], {"a": (IDS,), "b": 1}, Pair(IDS, IDS[:2])):
        assert batch_rows(batch) == extract_batch_size(batch) == 6


# Outputs


ROWS = [2, 2, 1, 1]


def per_row(of: Tensor) -> list[Tensor]:
    return list(of.split(ROWS))


def test_outputs_are_those_of_one_step_over_the_batch() -> None:
    values = torch.randn(6)

    def step(ids: Tensor, of: Tensor) -> dict[str, Any]:
        return {
            "loss": of.mean().requires_grad_(),
            "float": float(of.mean()),
            "ids": ids,
            "tokens": ids.flatten(),
            "chosen": ids[ids % 4 == 1],
            "none": None,
            "names": [f"row {i}" for i in ids[:, 0].tolist()],
            "sizes": [torch.zeros(i) for i in ids[:, 0].tolist()],
            "count": (ids > 4).sum(),
            "rows": len(ids),
            "index": 3,
            "kind": "train",
            "pair": (ids.float(), of.mean()),
            "both": [ids.float(), of.mean()],
            "array": ids.numpy(),
        }

    outputs = [step(ids, of) for ids, of in zip(per_row(IDS), per_row(values), strict=True)]
    found, expected = merge_outputs(outputs, ROWS), step(IDS, values)
    assert found.keys() == expected.keys()
    assert not found["loss"].requires_grad
    assert found["loss"].dtype == torch.float32
    for name in ("none", "names", "rows", "index", "kind"):
        assert found.pop(name) == expected.pop(name)
    torch.testing.assert_close(found, {**expected, "loss": expected["loss"].detach()}, check_stride=False)
    assert isinstance(found["array"], np.ndarray)


def test_what_does_not_follow_the_rows_is_kept_if_equal_and_averaged_if_not() -> None:
    fixed = torch.tensor([1.0, 2.0, 4.0, 8.0])
    assert torch.equal(merge_outputs([fixed] * 4, ROWS), fixed)
    found = merge_outputs([fixed * scale for scale in (1.0, 1.0, 1.0, 4.0)], ROWS)
    torch.testing.assert_close(found, fixed * 1.5)


def test_nothing_stays_nothing_and_what_some_leave_out_is_taken_from_the_others() -> None:
    assert merge_outputs([None, None], [1, 1]) is None
    assert merge_outputs([None, torch.tensor(3.0), torch.tensor(6.0)], [5, 1, 2]) == 5.0
    assert merge_outputs([{"a": 1.0}, {"a": 3.0, "b": 7.0}], [1, 1]) == {"a": 2.0, "b": 7.0}


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([{"a": "x"}, {"a": "y"}], r"output\['a'\] cannot be made one: 'x' and 'y'"),
        ([torch.zeros(1, 3), torch.zeros(1, 4)], "differ beyond dimension 0"),
        ([torch.zeros(1), {"a": 1}], "one type and some another: Tensor, dict"),
        ([True, False], "True in some microbatches"),
        ([object(), object()], "cannot be made one"),
    ],
)
def test_what_cannot_be_made_one_is_named(outputs: list[Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        merge_outputs(outputs, [1, 1])


def test_loss_is_weighted_by_rows_or_by_the_returned_weight() -> None:
    losses = [torch.tensor(value) for value in (4.0, 1.0, 7.0)]
    assert merge_outputs(losses, [1, 3, 1], training=True) == pytest.approx(14 / 5)
    assert merge_outputs([loss[None] for loss in losses], [1, 1, 1], training=True).tolist() == [4.0]
    outputs = [{"loss": loss, "weight": weight} for loss, weight in zip(losses, (1, 3, 0), strict=True)]
    outputs[2]["loss"] = torch.tensor(float("nan"))
    whole = merge_outputs(outputs, [2, 2, 2], training=True)
    assert whole == {"loss": pytest.approx(1.75), "weight": 4}
    assert isinstance(whole["weight"], int)


def test_microbatches_of_weight_zero_leave_nothing() -> None:
    nan = torch.tensor(float("nan"))
    empty = {"loss": nan, "weight": torch.tensor(0), "extra": nan}
    full = {"loss": torch.tensor(2.0), "weight": torch.tensor(5), "extra": torch.tensor(3.0)}
    whole = merge_outputs([empty, full, empty], [1, 1, 1], training=True)
    assert {name: float(value) for name, value in whole.items()} == {"loss": 2.0, "weight": 5.0, "extra": 3.0}
    assert whole["weight"].dtype == torch.int64
    assert merge_outputs([empty, empty], [1, 1], training=True)["loss"] == 0.0


def test_weights_from_some_microbatches_only_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match="Of 2 microbatches 1 returned a weight"):
        merge_outputs([{"loss": torch.tensor(1.0), "weight": 1}, {"loss": torch.tensor(1.0)}], [1, 1], training=True)

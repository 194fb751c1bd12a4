"""What was written into a copy of a tensor reaches the original."""

import pytest
import torch

from lightning_5d.data_parallel.changes import copy_changes

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool])


@DTYPES
@pytest.mark.parametrize("numel", [1, 7, 16])
def test_a_written_element_is_copied(dtype: torch.dtype, numel: int) -> None:
    original = torch.zeros(numel, dtype=dtype)
    seen = original.clone()
    seen[-1] = 1
    copy_changes(seen, original)
    assert torch.equal(original, seen)


@DTYPES
def test_nothing_written_leaves_the_original_alone(dtype: torch.dtype) -> None:
    original = torch.ones(9, dtype=dtype)
    before = original._version
    copy_changes(original.clone(), original)
    assert original._version == before


def test_a_nan_that_was_there_before_is_no_change() -> None:
    original = torch.tensor([float("nan"), 1.0])
    copy_changes(original.clone(), original)
    assert original._version == 0


def test_what_a_copy_of_lower_precision_leaves_alone_keeps_its_precision() -> None:
    original = torch.tensor([0.1, 0.2, 0.3])
    seen = original.bfloat16()
    seen[1] = 5.0
    copy_changes(seen, original)
    assert torch.equal(original, torch.tensor([0.1, 5.0, 0.3]))


def test_an_odd_offset_is_no_obstacle() -> None:
    original, seen = torch.zeros(5)[1:], torch.zeros(9)[4:8]
    seen[2] = 1
    copy_changes(seen, original)
    assert original.tolist() == [0, 0, 1, 0]

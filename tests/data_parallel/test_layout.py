"""Flat buffers: where shards of several dtypes lie, and which rank gets which rows of a gradient."""

import pytest
import torch

from lightning_5d.data_parallel.layout import Layout, cut_among_ranks


@pytest.mark.parametrize(
    "dtypes", [[torch.float32] * 4, [torch.bfloat16] * 4, [torch.float32, torch.bfloat16, torch.int8, torch.float64]]
)
def test_tensors_written_through_a_layout_are_read_back_and_do_not_overlap(dtypes: list[torch.dtype]) -> None:
    numels = [3, 0, 8, 5]
    layout = Layout(numels, dtypes)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for place, view in enumerate(layout.views(buffer)):
        view.fill_(place + 1)
    for place, (view, numel, dtype) in enumerate(zip(layout.views(buffer), numels, dtypes, strict=True)):
        assert view.dtype == dtype
        assert view.tolist() == [place + 1] * numel
        assert view.numel() == 0 or view.data_ptr() % dtype.itemsize == 0
    assert layout.payload == sum(numel * dtype.itemsize for numel, dtype in zip(numels, dtypes, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_rank_gets_its_rows_padded_with_zeros(ranks: int, dtype: torch.dtype) -> None:
    grads = [torch.arange(1.0, 9.0).view(4, 2), torch.arange(1.0, 6.0), torch.arange(1.0, 7.0).view(2, 3).t()]
    rows = [-(-grad.shape[0] // ranks) for grad in grads]
    numel = sum(row * (grad.numel() // grad.shape[0]) for row, grad in zip(rows, grads, strict=True))
    targets = [torch.full((numel,), float("nan"), dtype=dtype) for _ in range(ranks)]
    cut_among_ranks(grads, targets)
    for rank, target in enumerate(targets):
        expected = []
        for row, grad in zip(rows, grads, strict=True):
            mine = grad[rank * row : (rank + 1) * row]
            padded = torch.zeros(row, *grad.shape[1:])
            padded[: mine.shape[0]] = mine
            expected += padded.flatten().tolist()
        assert target.tolist() == expected

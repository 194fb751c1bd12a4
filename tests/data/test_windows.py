import numpy as np
import pytest
import torch

from lightning_5d.data.windows import TokenWindows, count_windows, split_by_position, unigram_entropy


def test_label_t_is_the_target_of_input_t():
    windows = TokenWindows(np.arange(10, dtype=np.uint16), sequence_length=3)
    assert len(windows) == 3
    assert windows[0]["input_ids"].tolist() == [0, 1, 2]
    assert windows[0]["labels"].tolist() == [1, 2, 3]
    assert windows[2]["input_ids"].tolist() == [6, 7, 8]
    assert windows[2]["labels"].tolist() == [7, 8, 9]
    assert windows[0]["labels"].dtype == torch.int64


def test_every_token_is_an_input_once_and_the_rest_is_left():
    windows = TokenWindows(np.arange(12, dtype=np.uint8), sequence_length=3)
    assert torch.cat([windows[i]["input_ids"] for i in range(len(windows))]).tolist() == list(range(9))
    with pytest.raises(IndexError):
        windows[3]


@pytest.mark.parametrize(("tokens", "length", "windows"), [(0, 4, 0), (4, 4, 0), (5, 4, 1), (8, 4, 1), (9, 4, 2)])
def test_a_window_needs_one_token_more_than_its_length(tokens, length, windows):
    assert count_windows(tokens, length) == windows
    assert len(TokenWindows(np.zeros(tokens, dtype=np.uint8), length)) == windows


def test_validation_is_the_end_and_nothing_is_in_both():
    train, val = split_by_position(np.arange(100, dtype=np.uint8), 0.25)
    assert train.tolist() == list(range(75))
    assert val.tolist() == list(range(75, 100))


def test_entropy_of_known_frequencies():
    assert unigram_entropy(np.array([7] * 8, dtype=np.uint16)) == pytest.approx(0.0)
    assert unigram_entropy(np.arange(256, dtype=np.uint8)) == pytest.approx(8.0)
    tokens = np.array([0, 0, 1, 9], dtype=np.uint16)
    assert unigram_entropy(tokens) == pytest.approx(1.5)
    assert unigram_entropy(tokens, chunk=1) == pytest.approx(1.5)

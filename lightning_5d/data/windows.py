"""A long row of tokens, cut into training examples of one length."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

TokenArray = npt.NDArray[np.unsignedinteger[Any]]


class TokenWindows(Dataset[dict[str, Tensor]]):
    """Window i reads tokens `[i*T, (i+1)*T)` as inputs; its labels are the same range one token later.

    So label t is the target of input t, no token is an input twice, and what is left at the end (fewer than T + 1
    tokens) is not used.

    Args:
        tokens: One-dimensional array of token ids; may be memory-mapped.
        sequence_length: T.
    """

    def __init__(self, tokens: TokenArray, sequence_length: int) -> None:
        self.tokens = tokens
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return count_windows(len(self.tokens), self.sequence_length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`{"input_ids": (T,), "labels": (T,)}`, both int64."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.sequence_length
        tokens = torch.from_numpy(self.tokens[start : start + self.sequence_length + 1].astype(np.int64))
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


def count_windows(tokens: int, sequence_length: int) -> int:
    """How many windows so many tokens give; each needs one token more than it has inputs, shared with the next."""
    return max(0, (tokens - 1) // sequence_length)


def split_by_position(tokens: TokenArray, val_fraction: float) -> tuple[TokenArray, TokenArray]:
    """The beginning for training and the last `val_fraction` for validation, without overlap."""
    cut = len(tokens) - round(len(tokens) * val_fraction)
    return tokens[:cut], tokens[cut:]


def unigram_entropy(tokens: TokenArray, chunk: int = 1 << 24) -> float:
    """Entropy in bits per token of the frequencies of the tokens: what a model that ignores context can reach."""
    counts = np.zeros(0, dtype=np.int64)
    for start in range(0, len(tokens), chunk):
        part = np.bincount(tokens[start : start + chunk])
        counts = np.pad(counts, (0, max(0, len(part) - len(counts))))
        counts[: len(part)] += part
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())

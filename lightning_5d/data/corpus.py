"""What all token data modules share: checks, the split, the order, the loaders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import lightning.pytorch as L
import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from typing_extensions import override

from lightning_5d.data.windows import TokenArray, TokenWindows, count_windows, split_by_position, unigram_entropy


class Corpus(L.LightningDataModule, ABC):
    """One long row of tokens as training and validation windows.

    Batches are `{"input_ids": (B, T), "labels": (B, T)}`, int64, label t being the target of input t. Validation is
    the last `val_fraction` of the tokens, training everything before.

    The order depends on `seed` and the epoch only, not on the number of ranks: one optimizer step of N data ranks sees
    the windows that one rank with N times the batch size would see. Windows that do not fill a last training batch on
    every rank are left for another epoch, and no validation window is counted twice.

    Args:
        sequence_length: Tokens of one window, T.
        batch_size: Windows of one batch on each data rank, B.
        val_fraction: The share of the tokens kept for validation, above 0 and below 1.
        vocab_size: The number of token ids the model knows.
        seed: Of the order of the training windows.
        num_workers: Processes that read ahead, on each rank.
    """

    def __init__(
        self,
        *,
        sequence_length: int = 256,
        batch_size: int = 8,
        val_fraction: float = 0.1,
        vocab_size: int = 256,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.vocab_size = vocab_size
        self.seed = seed
        self.num_workers = num_workers
        self._tokens: TokenArray | None = None

    @property
    @abstractmethod
    def source(self) -> str:
        """Where the tokens come from, in words that fit in a sentence."""

    @property
    def bytes_per_token(self) -> float | None:
        """How many bytes of text a token stands for; None when nobody knows."""
        return None

    @abstractmethod
    def _read(self) -> tuple[TokenArray | None, list[str]]:
        """The tokens, and what is wrong with their source. None when they cannot be had."""

    def encode(self, text: str) -> list[int] | None:
        """Token ids of a text; None when this data has no tokenizer at hand."""
        return None

    def decode(self, ids: list[int]) -> str | None:
        """The text of token ids; None when this data has no tokenizer at hand."""
        return None

    def problems(self, data_ranks: int = 1) -> list[str]:
        """Everything that keeps this data from being used, each with what was given and what would work.

        Args:
            data_ranks: How many ranks will share it.
        """
        problems = [
            f"{name} is {value}; it must be at least {least}."
            for name, value, least in (
                ("sequence_length", self.sequence_length, 1),
                ("batch_size", self.batch_size, 1),
                ("vocab_size", self.vocab_size, 1),
                ("num_workers", self.num_workers, 0),
            )
            if value < least
        ]
        fraction_is_right = 0 < self.val_fraction < 1
        if not fraction_is_right:
            problems.append(f"val_fraction is {self.val_fraction}; it must lie between 0 and 1, for example 0.1.")
        if self._tokens is None:
            self._tokens, source_problems = self._read()
            problems += source_problems
        if self._tokens is not None and fraction_is_right and self.sequence_length >= 1:
            problems += self._too_short(self._tokens) or self._too_few(self._tokens, data_ranks)
        return problems

    def check(self, data_ranks: int = 1) -> None:
        """Raise one error that lists all problems, or return.

        Args:
            data_ranks: How many ranks will share the data.

        Raises:
            ValueError: If there is any problem.
        """
        problems = self.problems(data_ranks)
        if problems:
            listed = "\n".join(f"  - {problem}" for problem in problems)
            raise ValueError(f"Cannot train on {self.source}:\n{listed}")

    @override
    def setup(self, stage: str) -> None:
        """Read and check the data; every rank does, so that all of them stop together."""
        self.check(self._ranks()["num_replicas"])

    @property
    def tokens(self) -> tuple[TokenArray, TokenArray]:
        """Training and validation tokens."""
        if self._tokens is None:
            self.check()
        if self._tokens is None:
            raise ValueError(f"{self.source} gave no tokens.")
        return split_by_position(self._tokens, self.val_fraction)

    def unigram_entropy(self) -> float:
        """Entropy of the training tokens' frequencies, in bits per token."""
        return unigram_entropy(self.tokens[0])

    @override
    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Training windows in a new, seeded order each epoch."""
        return self._loader(TokenWindows(self.tokens[0], self.sequence_length), train=True)

    @override
    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Validation windows in the order of the text."""
        return self._loader(TokenWindows(self.tokens[1], self.sequence_length), train=False)

    def _loader(self, windows: TokenWindows, *, train: bool) -> DataLoader[dict[str, Tensor]]:
        # Lightning leaves a DistributedSampler alone. Anything else it replaces or wraps when there are several ranks,
        # and then shuffles it in training, so the order would depend on how many ranks there are.
        sampler: DistributedSampler[Any] = DistributedSampler(
            windows, shuffle=train, seed=self.seed, drop_last=True, **self._ranks()
        )
        return DataLoader(windows, self.batch_size, sampler=sampler, drop_last=train, num_workers=self.num_workers)

    def _ranks(self) -> dict[str, int]:
        """How many ranks share the data, and which of them this is, as the strategy says."""
        kwargs = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        return dict(kwargs) if kwargs else {"num_replicas": 1, "rank": 0}

    def _too_few(self, tokens: TokenArray, data_ranks: int) -> list[str]:
        train, val = (
            count_windows(len(part), self.sequence_length) for part in split_by_position(tokens, self.val_fraction)
        )
        problems = []
        if train < self.batch_size * data_ranks:
            smaller = f"batch_size {train // data_ranks}, " if train >= data_ranks else ""
            problems.append(
                f"{train} training windows of {self.sequence_length} tokens do not fill one batch of {self.batch_size} "
                f"on each of {data_ranks} data ranks, which takes {self.batch_size * data_ranks}; use {smaller}fewer "
                f"ranks, a smaller sequence_length or more text."
            )
        if val < data_ranks:
            problems.append(
                f"{val} validation windows of {self.sequence_length} tokens are too few for {data_ranks} data ranks; "
                f"use at most {val} ranks, a higher val_fraction, a smaller sequence_length or more text."
            )
        return problems

    def _too_short(self, tokens: TokenArray) -> list[str]:
        lengths = [len(part) for part in split_by_position(tokens, self.val_fraction)]
        shortest = min(lengths)
        if all(count_windows(length, self.sequence_length) for length in lengths):
            return []
        longest_window = f"A sequence_length of at most {shortest - 1} fits, or" if shortest >= 2 else "Use"
        return [
            f"{len(tokens)} tokens split into {lengths[0]} for training and {lengths[1]} for validation "
            f"(val_fraction {self.val_fraction}); each part needs at least one window of {self.sequence_length} + 1 "
            f"tokens. {longest_window} a longer text."
        ]


def ids_out_of_range(tokens: TokenArray, vocab_size: int, chunk: int = 1 << 24) -> list[str]:
    """A problem naming the first token id that is not below `vocab_size`, and the highest; empty when there is none."""
    first: int | None = None
    highest = -1
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        highest = max(highest, int(part.max()))
        if first is None and highest >= vocab_size:
            first = start + int(np.argmax(part >= vocab_size))
    if first is None:
        return []
    return [
        f"token {first} has id {int(tokens[first])}, but the vocab_size is {vocab_size}; "
        f"the highest id is {highest}, so a vocab_size of {highest + 1} or more works."
    ]
